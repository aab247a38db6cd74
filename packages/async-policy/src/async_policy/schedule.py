"""What a scheduler is told, and what it hands out: settings, tickets, groups that are consumed."""

from dataclasses import dataclass
from typing import Literal

import attrs

from rl_contracts.rollout import PolicyVersion

ConsumptionOrder = Literal["data", "completion"]


@attrs.frozen(kw_only=True)
class Refill:
    """Dynamic sampling: a step consumes only groups that the caller keeps.

    The others, such as those whose samples all have the same reward and so teach nothing, are set
    aside, counted, and replaced by the next prompts of the data order (DAPO, arXiv:2503.14476,
    section 3.2, eq. 11), up to a bound.
    """

    max_rounds: int | None = attrs.field(
        validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Groups looked at for one step, in multiples of ``groups_per_step``, before it ends short.

    In completion order those that were being sampled ahead are looked at too as they end, so it may
    be as many more as sampling leads by. None: no limit of our own, so only the end of the data
    ends the search.
    """

    incomplete: Literal["yield", "raise"] = attrs.field(
        validator=attrs.validators.in_(("yield", "raise"))
    )
    """What becomes of a step that `max_rounds` or the end of the data leaves short: ``yield``
    trains on the groups there are, ``raise`` ends the run with `RefillError`. A step of no group
    at all raises in either case, except after the last prompt, where the run is over."""

    num_prompts: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Places of the data order that the whole run may use. Default: as many as `max_rounds` lets
    it use, from an order without an end."""

    def __attrs_post_init__(self) -> None:
        """Refuse a search that nothing ends."""
        if self.max_rounds is None and self.num_prompts is None:
            message = (
                "Refill: with max_rounds = None and num_prompts = None a policy whose groups are "
                "all set aside would sample for ever; give one of them"
            )
            raise ValueError(message)


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """How long a run is, and how old a group may be when it is trained on."""

    num_steps: int = attrs.field(validator=attrs.validators.ge(1))
    """Optimizer steps of the whole run, those before a resume included."""

    groups_per_step: int = attrs.field(validator=attrs.validators.ge(1))
    """Groups, one prompt each, that one optimizer step consumes."""

    max_staleness: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Most optimizer steps between a group's oldest token and the weights that are trained on it.

    0 is synchronous, 1 one step off, more is fully asynchronous. Default: synchronous, which
    needs no correction for stale data.
    """

    max_lead_groups: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Most groups that are admitted beyond those that the published version has consumed; above
    ``max_staleness * groups_per_step``, at most ``(max_staleness + 1) * groups_per_step``.

    A bound in fractions of a step, as verl's staleness_threshold is: see `from_verl`. Default:
    the most that `max_staleness` allows.
    """

    order: ConsumptionOrder = attrs.field(
        default="data", validator=attrs.validators.in_(("data", "completion"))
    )
    """Which groups a step consumes: ``data`` takes them in the order of the data, the same in every
    run, and waits for a slow group at its place; ``completion`` takes those that are done, and
    waits for a slow group only when it would become too stale. Default: reproducible."""

    refill: Refill | None = None
    """Dynamic sampling. Default: off, every group that is sampled is trained on."""

    def __attrs_post_init__(self) -> None:
        """Refuse what would be without effect beside another setting."""
        if self.order == "completion" and self.max_staleness == 0:
            message = (
                "SchedulerConfig: order = 'completion' has no effect with max_staleness = 0, where "
                "a step consumes all groups that are sampled; leave order at 'data'"
            )
            raise ValueError(message)
        self._check_lead()
        self._check_prompts()

    def _check_lead(self) -> None:
        if self.max_lead_groups is None:
            return
        if self.max_lead_groups < self.groups_per_step:
            message = (
                f"SchedulerConfig: with max_lead_groups = {self.max_lead_groups} no step could "
                f"ever have its {self.groups_per_step} groups (groups_per_step); give at least as "
                "many"
            )
            raise ValueError(message)
        implied = -(-self.max_lead_groups // self.groups_per_step) - 1
        if implied != self.max_staleness:
            message = (
                f"SchedulerConfig: max_lead_groups = {self.max_lead_groups} with groups_per_step = "
                f"{self.groups_per_step} lets groups become {implied} steps stale, and "
                f"max_staleness is {self.max_staleness}; set max_staleness to {implied}, or leave "
                "max_lead_groups out"
            )
            raise ValueError(message)

    def _check_prompts(self) -> None:
        if self.refill is None or self.refill.num_prompts is None:
            return
        if self.refill.incomplete == "raise" and self.refill.num_prompts < self.num_groups:
            message = (
                f"SchedulerConfig: refill.num_prompts = {self.refill.num_prompts} are fewer than "
                f"the {self.num_groups} groups of {self.num_steps} steps, so the run would end in "
                "an error even if every group were kept; add prompts, take fewer steps, or set "
                "refill.incomplete to 'yield'"
            )
            raise ValueError(message)

    @property
    def num_groups(self) -> int:
        """Groups that the steps of the whole run consume, if all are full."""
        return self.num_steps * self.groups_per_step

    @property
    def max_prompts(self) -> int:
        """Places of the data order that the run may use, at most: every index is below.

        Without `refill` that is `num_groups`, and each is trained on exactly once.
        """
        if self.refill is None:
            return self.num_groups
        ends = (self._max_looked_at, self.refill.num_prompts)
        return min(end for end in ends if end is not None)

    @property
    def _max_looked_at(self) -> int | None:
        """Groups that all steps can look at; the end of the data must not come before."""
        if self.max_candidates is None:
            return None
        ahead = self.lead_groups - self.groups_per_step if self.order == "completion" else 0
        return self.num_steps * (self.max_candidates + ahead)

    @property
    def max_candidates(self) -> int | None:
        """Groups looked at for one step, at most, before it ends short; None without a limit."""
        if self.refill is None or self.refill.max_rounds is None:
            return None
        return self.refill.max_rounds * self.groups_per_step

    @property
    def lead_groups(self) -> int:
        """Groups that are admitted, at most, beyond those that the published version consumed."""
        if self.max_lead_groups is not None:
            return self.max_lead_groups
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def max_publish_interval(self) -> int:
        """Most optimizer steps between two publishes; with more, sampling and training lock up."""
        return self.lead_groups // self.groups_per_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Leave to sample one group."""

    index: int
    """Place in the run's data order, from 0: which prompt, and what to derive its seed from."""

    step: PolicyVersion
    """Trained version that will consume the group; in completion order and with a refill, the last
    that may."""

    admitted_version: PolicyVersion
    """Version that every sampler ran, at least, when the group was admitted."""

    attempt: int
    """0 at first; one more each time the group is redone."""

    def __str__(self) -> str:
        """The group as a phrase for messages."""
        again = f", attempt {self.attempt}" if self.attempt else ""
        return f"group {self.index} (step {self.step}{again})"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyGroup:
    """A group that was sampled and is consumed now."""

    ticket: Ticket
    """The ticket that it was sampled on."""

    oldest_version: PolicyVersion
    """Version that its oldest token was drawn from."""

    version: PolicyVersion
    """Trained version that consumes it."""

    @property
    def staleness(self) -> int:
        """Optimizer steps between its oldest token and the weights that consume it."""
        return self.version - self.oldest_version
