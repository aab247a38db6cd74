"""Chat messages to token ids and back, with the tokenizer's own chat template.

The template is rendered once, by one function, and its length is what limits are compared with:
tool schemas, system defaults and the opening of the assistant's turn are counted because they are
in it. No prompt is ever truncated.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, SupportsIndex, TypeAlias

from rl_tasks.errors import NothingLeftError, TaskError
from rl_tasks.problem import ChatMessage, JsonValue, Problem
from rl_tasks.special_tokens import refuse_special_tokens

if TYPE_CHECKING:
    from rl_contracts.images import ImagePatches, PromptImage

ToolSchema: TypeAlias = dict[str, JsonValue] | Callable[..., object]
"""What transformers takes for a tool; here always a JSON schema."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here, typed so that one fits."""

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if the model has one."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        tools: list[ToolSchema] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
    ) -> object:
        """Token ids, or a mapping that holds them as ``input_ids`` (transformers 5)."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str | list[str]:  # noqa: FBT001, FBT002 - transformers' signature
        """The text of some ids; a list only for a list of lists."""


class LoadedImages(NamedTuple):
    """The images of one prompt."""

    shown: "tuple[PromptImage, ...]"
    """For the sampler."""

    patches: "tuple[ImagePatches, ...]"
    """For the trainer."""


def _no_images() -> LoadedImages:
    return LoadedImages(shown=(), patches=())


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedProblem:
    """A problem with the token ids of its prompt."""

    problem: Problem
    prompt_ids: tuple[int, ...]

    load_images: "Callable[[], LoadedImages]" = field(default=_no_images, compare=False, repr=False)
    """Decodes and processes the images of the prompt, each time anew; nothing where there are
    none. The completions of one prompt share what one call returned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedProblems:
    """Problems that are ready to be sampled from."""

    problems: tuple[EncodedProblem, ...]

    num_overlong: int
    """Problems that were dropped because their prompt was too long."""


def encode_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Mapping[str, JsonValue]] = (),
    name: str = "prompt",
) -> tuple[int, ...]:
    """Token ids of a chat, up to where the assistant's answer begins.

    A text begins once: where both the template and the tokenizer put a BOS, one of them is left
    out (vllm-project/vllm#27486).

    Args:
        tokenizer: renders and encodes.
        messages: the chat.
        tools: schemas that the template shows to the model.
        name: of the prompt, for messages.

    Raises:
        TypeError: if the tokenizer returns something other than token ids.
        ValueError: if it returns none.
        TaskError: for a message whose text holds a special token (`rl_tasks.special_tokens`).
    """
    refuse_special_tokens(tokenizer, messages, where=name)
    ids = render_chat(tokenizer, messages, tools=tools, add_generation_prompt=True)
    if not ids:
        message = f"the chat template rendered {len(messages)} messages to no token at all"
        raise ValueError(message)
    return ids


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Mapping[str, JsonValue]],
    add_generation_prompt: bool,
) -> tuple[int, ...]:
    """Token ids of a chat, with one BOS at most at its beginning.

    Raises:
        TypeError: if the tokenizer returns something other than token ids.
    """
    schemas: list[ToolSchema] = [dict(tool) for tool in tools]
    ids = _token_ids(
        tokenizer.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in messages],
            schemas or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
        )
    )
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        del ids[0]
    return tuple(ids)


def encode_problems(
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    *,
    max_prompt_tokens: int,
    overlong: Literal["error", "drop"],
    tools: Sequence[Mapping[str, JsonValue]] = (),
) -> EncodedProblems:
    """Encode all prompts, and decide before the run what happens to those that are too long.

    Args:
        tokenizer: renders and encodes.
        problems: what to encode.
        max_prompt_tokens: longest prompt, in tokens, everything that the template adds included.
        overlong: ``error`` refuses a data set with a longer prompt; ``drop`` leaves such problems
            out and counts them.
        tools: schemas that the template shows to the model, for every problem.

    Raises:
        TaskError: for a prompt over the limit, if that is an error, or one that shows images or
            holds a special token.
        NothingLeftError: if no problem is left.
    """
    encoded = (
        EncodedProblem(
            problem=_text_alone(problem),
            prompt_ids=encode_prompt(
                tokenizer, problem.messages, tools=tools, name=f"problem {problem.problem_id}"
            ),
        )
        for problem in problems
    )
    return kept_problems(encoded, max_prompt_tokens=max_prompt_tokens, overlong=overlong)


def _text_alone(problem: Problem) -> Problem:
    if problem.images:
        message = (
            f"problem {problem.problem_id} shows {len(problem.images)} images, which a tokenizer "
            "cannot encode; give the model's processor to rl_tasks.vision_chat"
        )
        raise TaskError(message)
    return problem


def kept_problems(
    encoded: Iterable[EncodedProblem],
    *,
    max_prompt_tokens: int,
    overlong: Literal["error", "drop"],
) -> EncodedProblems:
    """Decide what happens to prompts that are too long; see `encode_problems`."""
    kept = []
    lengths = []
    for each in encoded:
        lengths.append(len(each.prompt_ids))
        if len(each.prompt_ids) <= max_prompt_tokens:
            kept.append(each)
        elif overlong == "error":
            message = (
                f"problem {each.problem.problem_id}: its prompt has {lengths[-1]} tokens, the "
                f"limit is max_prompt_tokens = {max_prompt_tokens}; raise the limit, or choose "
                "overlong = 'drop' to leave such problems out"
            )
            raise TaskError(message)
    if not kept:
        shortest = f"; the shortest prompt has {min(lengths)} tokens" if lengths else ""
        message = (
            f"0 of {len(lengths)} problems left after dropping prompts longer than "
            f"max_prompt_tokens = {max_prompt_tokens}{shortest}"
        )
        raise NothingLeftError(message)
    return EncodedProblems(problems=tuple(kept), num_overlong=len(lengths) - len(kept))


def decode_completion(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of sampled ids, without special tokens such as the end of the turn.

    Raises:
        TypeError: if the tokenizer returns something other than text.
    """
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    if not isinstance(text, str):
        message = f"decode: expected text for one list of token ids, got {type(text).__name__}"
        raise TypeError(message)
    return text


def _token_ids(rendered: object) -> list[int]:
    if isinstance(rendered, Mapping):
        # transformers 5 returns a BatchEncoding, whose len() is the number of its keys
        if "input_ids" not in rendered:
            message = (
                f"apply_chat_template: expected 'input_ids' in the result, got {list(rendered)}"
            )
            raise TypeError(message)
        rendered = rendered["input_ids"]
    if isinstance(rendered, Sequence) and not isinstance(rendered, str | bytes):
        ids: list[int] = []
        for element in rendered:
            if not isinstance(element, SupportsIndex):
                break
            ids.append(index(element))
        else:
            return ids
    shown = repr(rendered)
    message = (
        "apply_chat_template: expected a list of integer token ids for one chat, "
        f"got {type(rendered).__name__} {shown[:60]}"
    )
    raise TypeError(message)
