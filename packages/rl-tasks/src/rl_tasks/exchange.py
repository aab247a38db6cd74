r"""A conversation of several turns as token ids and a loss mask.

What the model sampled stays as it was sampled, id by id. What others say in between (a tool's
result, a user's next message) is rendered by the chat template, and only those ids are taken that
the template puts between the end of the model's turn and the beginning of its next::

    prompt          completion             tool turn                          completion
    ...assistant\n  2+2 is ... <|im_end|>  \n<|im_start|>tool ... assistant\n  4 <|im_end|>
    mask 0          mask 1                 mask 0                             mask 1

The separator behind the end of a turn (``\n`` in ChatML) belongs to the template: a model stops at
``<|im_end|>`` and never samples it, and leaving it out shows the model a text that it has not seen
in training (verl-project/verl#6921). Nothing is decoded and tokenised again, so every turn is an
exact prefix of the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_contracts import Completion, PolicyVersion, Trajectory
from rl_tasks.chat import Tokenizer, render_chat
from rl_tasks.problem import ChatMessage, JsonValue
from rl_tasks.special_tokens import without_special_tokens

if TYPE_CHECKING:
    from rl_contracts.images import ImagePatches  # needs numpy


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """The tokens of a conversation so far. Begin with a prompt, then add turns."""

    token_ids: tuple[int, ...]
    """All tokens, the prompt first."""

    loss_mask: tuple[bool, ...]
    """True on the tokens that the model sampled, whatever their value."""

    rollout_logprobs: tuple[float, ...]
    """The sampler's log-probability of each token, in nats; 0.0 where `loss_mask` is False, which
    says nothing and must not reach a loss."""

    policy_versions: tuple[PolicyVersion, ...] = ()
    """Of the sampled tokens alone, in their order."""

    num_completions: int = 0

    open_for_messages: bool = False
    """Whether the last turn is the model's and was ended by the model."""

    images: "tuple[ImagePatches, ...]" = field(default=(), repr=False)
    """What the prompt shows; they are not copied."""

    @staticmethod
    def begin(prompt_ids: Sequence[int], *, images: "Sequence[ImagePatches]" = ()) -> "Exchange":
        """The prompt alone, as `encode_prompt` makes it.

        Args:
            prompt_ids: of the prompt.
            images: those that the prompt shows, in the order of their places.
        """
        return Exchange(
            token_ids=tuple(prompt_ids),
            loss_mask=(False,) * len(prompt_ids),
            rollout_logprobs=(0.0,) * len(prompt_ids),
            images=tuple(images),
        )

    def with_completion(self, completion: Completion) -> "Exchange":
        """Add what the model sampled for the tokens so far.

        Raises:
            ValueError: if the last turn is the model's already.
        """
        if self.loss_mask and self.loss_mask[-1]:
            message = "Exchange: a completion follows a prompt or messages, not another completion"
            raise ValueError(message)
        return Exchange(
            token_ids=self.token_ids + completion.token_ids,
            loss_mask=self.loss_mask + (True,) * len(completion.token_ids),
            rollout_logprobs=self.rollout_logprobs + completion.rollout_logprobs,
            policy_versions=self.policy_versions + completion.policy_versions,
            num_completions=self.num_completions + 1,
            open_for_messages=completion.finish_reason == "stop" and bool(completion.token_ids),
            images=self.images,
        )

    def with_messages(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, JsonValue]] = (),
    ) -> "Exchange":
        """Add what others say, up to where the model's next turn begins; all with mask 0.

        Raises:
            ValueError: if the model has not ended its turn (a completion that was cut off has no
                next turn), or if the template does not end turns with the token that it ended with.
        """
        if not self.open_for_messages:
            message = (
                "Exchange: messages follow a completion with finish_reason 'stop'; a turn that was "
                "cut off, or that the model has not taken, cannot be answered"
            )
            raise ValueError(message)
        ids = ids_between_turns(tokenizer, messages, end_of_turn_id=self.token_ids[-1], tools=tools)
        return Exchange(
            token_ids=self.token_ids + ids,
            loss_mask=self.loss_mask + (False,) * len(ids),
            rollout_logprobs=self.rollout_logprobs + (0.0,) * len(ids),
            policy_versions=self.policy_versions,
            num_completions=self.num_completions,
            images=self.images,
        )

    def to_trajectory(self, *, trajectory_id: str, group_id: str) -> Trajectory:
        """The record to train on.

        Raises:
            ValueError: if nothing was sampled, if the exchange ends with what others said, or if
                an image does not lie in the prompt.
        """
        if not self.policy_versions or not self.loss_mask[-1]:
            message = f"Exchange {trajectory_id}: expected a sampled token at the end"
            raise ValueError(message)
        return Trajectory(
            trajectory_id=trajectory_id,
            group_id=group_id,
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            rollout_logprobs=self.rollout_logprobs,
            oldest_version=min(self.policy_versions),
            newest_version=max(self.policy_versions),
            images=self.images,
        )


_USER = ChatMessage(role="user", content="a")
_TURNS = tuple(ChatMessage(role="assistant", content=content) for content in ("b", "c"))
"""Stand for the conversation so far, whose ids are known and are not rendered again."""


def ids_between_turns(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    end_of_turn_id: int,
    tools: Sequence[Mapping[str, JsonValue]] = (),
) -> tuple[int, ...]:
    """The ids from behind the end of one assistant turn to the beginning of the next.

    What looks like a special token in a message is text, as `rl_tasks.special_tokens` says: nothing
    that a tool repeats ends its turn.

    Args:
        tokenizer: renders and encodes.
        messages: what is said in between, at least one message.
        end_of_turn_id: the token with which the model ended its turn.
        tools: schemas that the template shows to the model, as for the prompt.

    Raises:
        ValueError: without messages, or if the template does not end turns with that token.
    """
    messages = [without_special_tokens(tokenizer, message) for message in messages]
    if not messages:
        message = "ids_between_turns: expected at least one message"
        raise ValueError(message)
    before, other = (
        render_chat(tokenizer, (_USER, turn), tools=tools, add_generation_prompt=False)
        for turn in _TURNS
    )
    # what follows the text of a turn: its end, and what separates it from the next
    behind = _common_end(before, other)
    whole = render_chat(
        tokenizer, (_USER, _TURNS[0], *messages), tools=tools, add_generation_prompt=True
    )
    # The assistant's turn is the last of `before`. It is found in `whole` by the count of ends and
    # not by length: templates render a last turn otherwise than one with something behind it
    # (Qwen3 gives the last one an empty thought).
    num_ends = before.count(end_of_turn_id)
    ends = [index for index, token in enumerate(whole) if token == end_of_turn_id]
    if behind[:1] != (end_of_turn_id,) or len(ends) < num_ends:
        message = (
            f"the model ended its turn with token {end_of_turn_id}, the chat template ends one "
            f"with {list(behind[:1])}; sample with the template's end of turn as the stop token"
        )
        raise ValueError(message)
    ids = whole[ends[num_ends - 1] + 1 :]
    separator = behind[1:]
    if ids[: len(separator)] != separator or len(ids) == len(separator):
        message = (
            "the chat template does not put the messages behind the assistant's turn: expected ids "
            f"that begin with {list(separator)}, got {list(ids[:8])}"
        )
        raise ValueError(message)
    return ids


def _common_end(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return one[len(one) - length :]
