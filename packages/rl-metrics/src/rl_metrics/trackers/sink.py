"""What a tracker is to a run: something that takes one record per step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rl_metrics.effective import SettingValue
from rl_metrics.jsonl import StepRecord


class MetricsSink(Protocol):
    """Takes the records of a run, in order."""

    def write(self, record: StepRecord) -> None:
        """Take one step. When it returns, a kill of this process no longer loses the step.

        A failure is an exception; the step is then missing, and the next one may be tried.
        """

    def close(self, *, failed: bool = False) -> None:
        """End the run there: as finished, or as failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """The run, as a tracker gets to know it."""

    name: str
    """What the run is called in the tracker: the name of its folder."""

    folder: Path
    """Absolute path of the run folder."""

    is_resumed: bool = False
    """Whether an earlier part of this run may have been written already."""

    settings: Mapping[str, SettingValue] = field(default_factory=dict)
    """Dotted path to value: the effective configuration, for trackers that show one."""
