"""Rewards for the shape of a completion: its sections and its length."""

import re
from typing import final

import attrs

from rl_contracts import FinishReason
from rl_tasks.rewards import RewardResult


def _check_tags(
    _: object, attribute: "attrs.Attribute[tuple[str, ...]]", tags: tuple[str, ...]
) -> None:
    if not tags or len(set(tags)) != len(tags) or not all(map(_is_tag, tags)):
        message = (
            f"TaggedSections: expected different names of letters, digits and _ in "
            f"{attribute.name}, got {tags}"
        )
        raise ValueError(message)


def _is_tag(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is not None


@final
@attrs.frozen(kw_only=True)
class TaggedSections:
    """1 if the completion consists of the given sections, in order, each once.

    ``<think>...</think><answer>...</answer>``: nothing but white space stands outside, no section
    is blank, and none of the tags occurs anywhere else. Where the chat template opens the first
    section in the prompt, say so in `first_is_open`.

    Reasons: ``right``, ``wrong_sections``.
    """

    tags: tuple[str, ...] = attrs.field(default=("think", "answer"), validator=_check_tags)
    """Names of the sections. Default: those of DeepSeek-R1 (https://arxiv.org/abs/2501.12948)."""

    first_is_open: bool = False
    """Whether the prompt ends with the first opening tag already."""

    def __call__(
        self, text: str, *, ground_truth: str, finish_reason: FinishReason
    ) -> RewardResult:
        """Grade `text`."""
        del ground_truth, finish_reason
        whole = f"<{self.tags[0]}>{text}" if self.first_is_open else text
        right = self._has_sections(whole)
        return RewardResult(
            value=1.0 if right else 0.0, reason="right" if right else "wrong_sections"
        )

    def _has_sections(self, text: str) -> bool:
        rest = text
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                return False
            outside, _, behind = rest.partition(opening)
            content, found, rest = behind.partition(closing)
            if outside.strip() or not found or not content.strip():
                return False
        return not rest.strip()


@final
@attrs.frozen(kw_only=True)
class LengthWithin:
    """1 if the text has at least `min_characters` and at most `max_characters`.

    White space at the ends does not count. A reward on lengths in tokens belongs to the algorithm,
    which knows the tokens.

    Reasons: ``right``, ``too_short``, ``too_long``.
    """

    max_characters: int = attrs.field(validator=attrs.validators.ge(1))

    min_characters: int = attrs.field(default=0, validator=attrs.validators.ge(0))

    def __attrs_post_init__(self) -> None:
        """Refuse limits that no text keeps."""
        if self.min_characters > self.max_characters:
            message = (
                f"LengthWithin: min_characters = {self.min_characters} is above max_characters = "
                f"{self.max_characters}"
            )
            raise ValueError(message)

    def __call__(
        self, text: str, *, ground_truth: str, finish_reason: FinishReason
    ) -> RewardResult:
        """Grade `text`."""
        del ground_truth, finish_reason
        length = len(text.strip())
        if length < self.min_characters:
            return RewardResult(value=0.0, reason="too_short")
        if length > self.max_characters:
            return RewardResult(value=0.0, reason="too_long")
        return RewardResult(value=1.0, reason="right")
