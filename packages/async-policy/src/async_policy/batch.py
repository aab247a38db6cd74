"""What a training loop is handed: the groups of a step, and what the pipeline did meanwhile."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from async_policy.schedule import Ticket
from rl_contracts.rollout import PolicyVersion

GroupT = TypeVar("GroupT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """What the pipeline did from one batch to the next, counted in groups."""

    num_sampled: int = 0
    """Groups that were completed, those set aside included."""

    num_set_aside: int = 0
    """Groups that `keep` refused."""

    num_redone: int = 0
    """Groups that were lost and are sampled again."""

    num_partial: int = 0
    """Groups completed during whose sampling a publish ended: their tokens may come from several
    versions."""

    num_in_flight: int = 0
    """Groups being sampled when the batch was handed out."""

    num_waiting: int = 0
    """Depth of the queue: groups sampled and not consumed when the batch was handed out, its own
    aside."""

    staleness: Mapping[int, int] = field(default_factory=dict)
    """The batch's groups by staleness, in optimizer steps."""

    waited_s: float = 0.0
    """Seconds that the loop stood still until the batch was complete."""

    elapsed_s: float = 0.0
    """Seconds since the batch before was handed out; of the first, since the rollouts opened."""

    @property
    def idle_fraction(self) -> float:
        """Share of the time in which the loop waited for groups."""
        return self.waited_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def partial_fraction(self) -> float:
        """Share of the completed groups during whose sampling a publish ended."""
        return self.num_partial / self.num_sampled if self.num_sampled else 0.0

    @property
    def redone_fraction(self) -> float:
        """Share of the samplings that were lost work."""
        ended = self.num_sampled + self.num_redone
        return self.num_redone / ended if ended else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch(Generic[GroupT]):
    """What one optimizer step consumes."""

    version: PolicyVersion
    """Trained version that consumes it; the optimizer step leads to one more."""

    tickets: tuple[Ticket, ...]
    """One per group, by index."""

    groups: tuple[GroupT, ...]
    """What `sample` returned, by index."""

    staleness: tuple[int, ...]
    """One per group, by index: optimizer steps between its oldest token and `version`."""

    waited_s: float
    """Seconds that the loop stood still until this batch was complete."""

    set_aside: tuple[GroupT, ...] = ()
    """Groups that were looked at for this batch and that `keep` refused, by index. To be counted,
    not to be trained on: their prompts are consumed with the batch."""

    activity: Activity = field(default_factory=Activity)
    """What the pipeline did since the batch before."""
