"""What a run and the processes of its trackers say to each other: one JSON object per line."""

from typing import Literal, TypedDict

from rl_metrics.effective import SettingValue


class RunFields(TypedDict):
    """A `TrackedRun` as JSON holds it."""

    name: str
    folder: str
    is_resumed: bool
    settings: dict[str, SettingValue]


class OpenRequest(TypedDict):
    """Begin the run in the tracker."""

    do: Literal["open"]
    config: dict[str, str | None]
    run: RunFields


class WriteRequest(TypedDict):
    """Take one step."""

    do: Literal["write"]
    record: str
    """The line of ``metrics.jsonl``."""


class CloseRequest(TypedDict):
    """End the run in the tracker."""

    do: Literal["close"]
    failed: bool


Request = OpenRequest | WriteRequest | CloseRequest


class Answer(TypedDict):
    """To every request."""

    problem: str
    """What went wrong; empty if nothing did."""
