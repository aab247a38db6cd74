"""One prompt in vLLM's words: token ids, and the images that stand at its placeholders.

vLLM writes the placeholders of an image itself: it wants one in the prompt and puts as many in its
place as its own processor says. A prompt that holds all of them gets more, without a word (0.32:
23 tokens of 20). So each image's placeholders go in as one, and what vLLM made of the prompt is
compared with what was asked. Only `vllm_requests` and `vllm_engine` import this module.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from vllm.inputs import EngineInput, tokens_input

from rl_contracts.images import PromptImage
from rollout_vllm.errors import GenerationError

if TYPE_CHECKING:
    from PIL.Image import Image


class Prompt(NamedTuple):
    """What the samples of a request begin with."""

    token_ids: Sequence[int]
    """With every placeholder."""

    images: Sequence[PromptImage]
    """In the order of their places."""

    def for_engine(self) -> EngineInput:
        """What vLLM is given."""
        if not self.images:
            return tokens_input(list(self.token_ids))
        given = {
            "prompt_token_ids": self.short_ids(),
            "multi_modal_data": {"image": self.pictures()},
        }
        return cast("EngineInput", given)  # a TokensPrompt, which vLLM has yet to process

    def short_ids(self) -> list[int]:
        """The token ids with one placeholder for each image."""
        short: list[int] = []
        end = 0
        for image in self.images:
            short += self.token_ids[end : image.first_token + 1]
            end = image.first_token + image.num_tokens
        return short + list(self.token_ids[end:])

    def pictures(self) -> list["Image"]:
        """The images as vLLM's processor takes them."""
        from PIL import Image  # noqa: PLC0415 - vLLM brings it

        return [Image.fromarray(image.rgb) for image in self.images]

    def check_read(self, token_ids: Sequence[int] | None) -> None:
        """Refuse an answer to a prompt that vLLM read otherwise than it was meant.

        Raises:
            GenerationError: with the first place where the two differ.
        """
        if not self.images or list(self.token_ids) == (found := list(token_ids or ())):
            return
        wanted = list(self.token_ids)
        place = next(
            (k for k, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b),
            min(len(wanted), len(found)),
        )
        message = (
            f"vLLM read a prompt of {len(found)} tokens where {len(wanted)} were meant; they "
            f"differ from token {place} on ({wanted[place : place + 3]} meant, "
            f"{found[place : place + 3]} read): its image processor makes other placeholders of an "
            "image than the one that encoded the prompt; both must be those of the folder "
            "VllmConfig.model"
        )
        raise GenerationError(message)
