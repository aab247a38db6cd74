"""What a task is made of: one prompt as chat messages, and what its answer is compared with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rl_tasks.pictures import PLACEHOLDER

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
"""What JSON can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    """One message of a chat."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""

    content: str
    """Its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A prompt and what its completions are graded against."""

    problem_id: str
    """Unique within a data set; stays the same from run to run."""

    messages: tuple[ChatMessage, ...]
    """The prompt, at least one message."""

    ground_truth: str
    """What the reward compares a completion with, in the form that this reward reads."""

    data_source: str
    """Name of the data set; chooses the reward."""

    images: tuple[bytes, ...] = field(default=(), repr=False)
    """Encoded image files, one for each ``<image>`` in the messages, in that order. A problem
    without images may hold that text."""

    extra_info: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)
    """Whatever else came with the row; nothing here reads it."""

    def __post_init__(self) -> None:
        """Refuse a problem that cannot be asked or graded."""
        for name in ("problem_id", "messages", "data_source"):
            if not getattr(self, name):
                message = f"Problem {self.problem_id!r}: {name} must not be empty"
                raise ValueError(message)
        found = sum(message.content.count(PLACEHOLDER) for message in self.messages)
        if self.images and found != len(self.images):
            message = (
                f"Problem {self.problem_id!r}: expected one {PLACEHOLDER} in its messages for each "
                f"of its {len(self.images)} images, got {found}"
            )
            raise ValueError(message)
