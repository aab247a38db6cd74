"""When a group may start, and which groups the next optimizer step consumes.

A pure state machine: no clock, no thread, no input or output. Its unit is a group, the samples of
one prompt. Every group has a place in the run's data order, its ``index``, and moves so::

                 admit()             complete()          take_batch()             trained()
    not admitted ───────▶ in flight ───────────▶ waiting ───────────▶ in training ────────▶ trained
                            ▲   │
                    admit() │   │ fail()
                            │   ▼
                         to be redone

``trained_version`` counts optimizer steps; ``published_version`` is the version that *every*
sampler runs, at least. Nothing is ever dropped. In data order, a group with index ``i`` is consumed
by step ``i // groups_per_step``, without exception. In completion order, groups that are done
overtake those that are not, as far as the bound allows.

Why admission alone bounds the staleness
    Let ``B = groups_per_step``, ``k = max_staleness``, ``t`` and ``p`` the trained and published
    version, and ``o`` the number of groups in flight, waiting or in training. Groups are consumed
    in admission order, ``B`` a step, so the groups admitted so far are the first ``t * B + o`` of
    the data order (those to be redone aside, which come first at the next admission).
    ``capacity = (p - t + k + 1) * B - o`` therefore lets index ``i`` in only while
    ``i < (p + k + 1) * B``, which is ``i // B <= p + k``. The group is consumed at version
    ``s = i // B``, and its oldest token cannot come from weights older than ``p``, since every
    sampler ran at least ``p`` when it started. Hence ``staleness = s - oldest <= s - p <= k``.
    A group that is redone starts later, under a ``p`` that is no smaller.

    The bound is reached: with ``k = 1`` the groups of step ``s`` are admitted as soon as version
    ``s - 1`` is published, and are one step old when they are consumed. With ``k = 0`` nothing
    is admitted between ``take_batch()`` and ``published()``: the synchronous loop.

    A bound that is finer than a step
        ``max_lead_groups`` (``L``) takes the place of ``(k + 1) * B``: index ``i`` is let in only
        while ``i < p * B + L``. Since ``k * B < L <= (k + 1) * B``, the staleness is still ``k`` at
        most, but only ``L - k * B`` groups of each step may reach it.

    Completion order keeps the same bound
        A group admitted under ``p`` has the deadline ``p + k``, the last version that may consume
        it. Admission keeps ``n(d) <= (d - t + 1) * B`` for every ``d``, where ``n(d)`` counts the
        groups in flight, waiting or in training with a deadline of at most ``d``: new groups have
        the latest deadline of all, for which this is the rule of capacity. A step takes the ``B``
        completed groups with the earliest deadlines, and only once what is left behind has
        ``n(d) <= (d - t) * B``; so it waits for a group that is late, but not before it must. When
        all groups are completed the earliest ``B`` always leave that behind, so nothing locks up.

    Counting from the versions, not from counters of accepted groups, keeps the capacity right
    after a restore (areal-project/AReaL#1388: a restored version beside fresh counters gave
    816 instead of 16).

Why it cannot lock up
    The next step needs the indices below ``(t + 1) * B``; all of them are admissible as soon as
    ``(t - p + 1) * B <= L``, which is ``t - p <= k`` where no finer bound is set. Otherwise the
    trainer is too far ahead of the samplers, and `Scheduler.stall_reason` says which version must
    be published: every ``L // B`` steps are often enough (`SchedulerConfig.max_publish_interval`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeGuard, cast, final

import attrs

from async_policy.errors import VersionError
from async_policy.json_files import JsonValue
from rl_contracts.rollout import PolicyVersion

STATE_FORMAT = 2

ConsumptionOrder = Literal["data", "completion"]


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

    def __attrs_post_init__(self) -> None:
        """Refuse what would be without effect beside another setting."""
        if self.order == "completion" and self.max_staleness == 0:
            message = (
                "SchedulerConfig: order = 'completion' has no effect with max_staleness = 0, where "
                "a step consumes all groups that are sampled; leave order at 'data'"
            )
            raise ValueError(message)
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

    @property
    def num_groups(self) -> int:
        """Groups of the whole run: each of these indices is trained on exactly once."""
        return self.num_steps * self.groups_per_step

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
    """Trained version that will consume the group; in completion order, the last that may."""

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


@final
class Scheduler:
    """The state machine of this module's picture. Deterministic; not to be shared by threads."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start a run at version 0, which trainer and samplers were both built with."""
        self.config = config
        self._trained = 0
        self._published: int | None = 0
        self._next_index = 0
        self._first_untrained = 0
        self._trained_ahead: set[int] = set()  # indices above the first untrained one
        self._attempts_to_redo: dict[int, int] = {}
        self._in_flight: dict[int, Ticket] = {}
        self._waiting: dict[int, tuple[Ticket, PolicyVersion]] = {}
        self._waiting_by_step: dict[int, list[int]] = {}  # as they were completed
        self._num_by_step: dict[int, int] = {}  # of the groups in flight or waiting
        self._in_training: tuple[ReadyGroup, ...] = ()

    @property
    def trained_version(self) -> PolicyVersion:
        """Optimizer steps done."""
        return PolicyVersion(self._trained)

    @property
    def published_version(self) -> PolicyVersion | None:
        """Version that every sampler runs, at least; None after a restore, until published."""
        return None if self._published is None else PolicyVersion(self._published)

    @property
    def num_in_flight(self) -> int:
        """Groups being sampled."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Groups sampled and not yet consumed."""
        return len(self._waiting)

    @property
    def in_flight(self) -> tuple[Ticket, ...]:
        """Tickets of the groups being sampled, in data order."""
        return tuple(self._in_flight[index] for index in sorted(self._in_flight))

    @property
    def finished(self) -> bool:
        """Whether every optimizer step of the run is done."""
        return self._trained == self.config.num_steps

    @property
    def capacity(self) -> int:
        """Groups that the staleness bound lets in now, however many the run still needs.

        Never negative; 0 after a restore until the restored version is published.
        """
        if self._published is None:
            return 0
        behind = (self._trained - self._published) * self.config.groups_per_step
        outstanding = len(self._in_flight) + len(self._waiting) + len(self._in_training)
        return max(0, self.config.lead_groups - behind - outstanding)

    @property
    def stall_reason(self) -> str | None:
        """Why the next batch can never become complete unless something is published, or None."""
        if self.finished or self._in_training or self._in_flight or self._admissible():
            return None
        if self._next_indices() is not None:
            return None
        if self._published is None:
            return (
                f"the run was restored at version {self._trained} and no sampler has been given "
                f"these weights; publish version {self._trained} first"
            )
        bound = f"max_staleness is {self.config.max_staleness}"
        if self.config.max_lead_groups is not None:
            bound = f"max_lead_groups is {self.config.max_lead_groups}"
        return (
            f"the samplers run version {self._published}, the trainer has version {self._trained}, "
            f"and {bound}: the batch cannot be completed until version "
            f"{self._trained - self.config.max_publish_interval + 1} or later is published"
        )

    def admit(self) -> list[Ticket]:
        """Tickets for all groups that may start now, in data order; those to be redone first.

        Each ticket must come back, by `complete` or by `fail`. Never admits more groups than the
        run needs.
        """
        tickets: list[Ticket] = []
        for _ in range(self._admissible()):
            if self._attempts_to_redo:
                index = min(self._attempts_to_redo)
                attempt = self._attempts_to_redo.pop(index)
            else:
                index, attempt = self._new_index(), 0
            published = self._published or 0
            step = index // self.config.groups_per_step
            if self.config.order == "completion":
                step = min(published + self.config.max_staleness, self.config.num_steps - 1)
            ticket = Ticket(
                index=index,
                step=PolicyVersion(step),
                admitted_version=PolicyVersion(published),
                attempt=attempt,
            )
            self._in_flight[index] = ticket
            self._num_by_step[step] = self._num_by_step.get(step, 0) + 1
            tickets.append(ticket)
        return tickets

    def complete(self, ticket: Ticket, oldest_version: PolicyVersion) -> None:
        """Take note that a group was sampled; `oldest_version` is that of its oldest token.

        Raises:
            ValueError: if the ticket is not in flight.
            VersionError: if the version is older than what every sampler ran when the group was
                admitted, or newer than what was trained. The ticket stays in flight.
        """
        self._check_in_flight("complete", ticket)
        if oldest_version < ticket.admitted_version:
            message = (
                f"{ticket} was admitted when every sampler ran version {ticket.admitted_version} "
                f"or later, but its oldest token is from version {oldest_version}: a sampler "
                f"still answers with older weights than were published"
            )
            raise VersionError(message)
        if oldest_version > self._trained:
            message = (
                f"{ticket} reports version {oldest_version}, but the trainer has only reached "
                f"version {self._trained}: trainer and sampler count versions differently"
            )
            raise VersionError(message)
        del self._in_flight[ticket.index]
        self._waiting[ticket.index] = (ticket, oldest_version)
        self._waiting_by_step.setdefault(ticket.step, []).append(ticket.index)

    def fail(self, ticket: Ticket) -> None:
        """Take note that a group was lost. It keeps its place and is redone at the next `admit`.

        Raises:
            ValueError: if the ticket is not in flight.
        """
        self._check_in_flight("fail", ticket)
        del self._in_flight[ticket.index]
        self._forget(ticket.step)
        self._attempts_to_redo[ticket.index] = ticket.attempt + 1

    def take_batch(self) -> tuple[ReadyGroup, ...] | None:
        """The groups of the next optimizer step by index, or None while one is missing.

        Raises:
            ValueError: if the step before has not been reported by `trained`, or the run is over.
            VersionError: if a group is staler than allowed, which this class exists to prevent.
        """
        if self.finished:
            message = f"take_batch: all {self.config.num_steps} steps of the run are done"
            raise ValueError(message)
        if self._in_training:
            message = (
                f"take_batch: the batch of version {self._trained} was taken and is still in "
                f"training; call trained({self._trained + 1}) after its optimizer step"
            )
            raise ValueError(message)
        indices = self._next_indices()
        if indices is None:
            return None
        batch = tuple(
            ReadyGroup(
                ticket=self._waiting[index][0],
                oldest_version=self._waiting[index][1],
                version=self.trained_version,
            )
            for index in indices
        )
        for group in batch:
            if group.staleness > self.config.max_staleness:
                message = (
                    f"{group.ticket} has staleness {group.staleness}, above max_staleness "
                    f"{self.config.max_staleness}; this is a bug in async-policy"
                )
                raise VersionError(message)
        for group in batch:
            ticket = group.ticket
            del self._waiting[ticket.index]
            done = self._waiting_by_step[ticket.step]
            done.remove(ticket.index)
            if not done:
                del self._waiting_by_step[ticket.step]
            self._forget(ticket.step)
        self._in_training = batch
        return batch

    def trained(self, version: PolicyVersion) -> None:
        """Take note that the optimizer step on the taken batch is done, and led to `version`.

        Raises:
            ValueError: if no batch was taken, or the version is not one more than before.
        """
        if not self._in_training:
            message = f"trained({version}): no batch was taken since version {self._trained}"
            raise ValueError(message)
        if version != self._trained + 1:
            message = (
                f"trained({version}): expected version {self._trained + 1}, one optimizer step "
                f"per batch"
            )
            raise ValueError(message)
        self._trained_ahead.update(group.ticket.index for group in self._in_training)
        while self._first_untrained in self._trained_ahead:
            self._trained_ahead.remove(self._first_untrained)
            self._first_untrained += 1
        self._in_training = ()
        self._trained = version

    def published(self, version: PolicyVersion) -> None:
        """Take note that every sampler runs `version` or later.

        Publishing the present version again is allowed and changes nothing.

        Raises:
            ValueError: if the version falls, or has not been trained.
        """
        self.check_publishable(version)
        self._published = version

    def check_publishable(self, version: PolicyVersion) -> None:
        """Raise what `published` would raise, before weights are sent anywhere."""
        lowest = self._trained if self._published is None else self._published
        if not lowest <= version <= self._trained:
            allowed = f"{lowest}" if lowest == self._trained else f"{lowest} to {self._trained}"
            message = (
                f"publish {version}: expected version {allowed}; a published version never "
                f"falls, is never ahead of the trainer, and is the restored one after a restore"
            )
            raise ValueError(message)

    def state(self) -> dict[str, JsonValue]:
        """What a later process needs to go on, as JSON.

        Groups in flight, waiting or in training have not been trained on; `from_state` admits
        them again, in the same order, so that each index is trained on exactly once.
        """
        return {
            "format": STATE_FORMAT,
            "trained_version": self._trained,
            "groups_per_step": self.config.groups_per_step,
            "trained_ahead": sorted(self._trained_ahead),
        }

    @classmethod
    def from_state(cls, state: JsonValue, config: SchedulerConfig) -> Self:
        """Go on from `state`. Nothing is admitted before the restored version is published.

        `num_steps` and `max_staleness` may differ from the run that wrote the state.

        Raises:
            ValueError: if the state is not one of `state()`, has more steps behind it than
                `config` has, or was written with another `groups_per_step`, which decides which
                prompts have been trained on.
        """
        if not isinstance(state, Mapping) or state.get("format") != STATE_FORMAT:
            message = (
                f"from_state: expected a scheduler state of format {STATE_FORMAT}, got {state!r}"
            )
            raise ValueError(message)
        values: dict[str, int] = {}
        for name in ("trained_version", "groups_per_step"):
            value = state.get(name)
            if not _is_count(value):
                message = f"from_state: expected {name} as an int of at least 0, got {value!r}"
                raise ValueError(message)
            values[name] = value
        ahead = state.get("trained_ahead")
        if not isinstance(ahead, Sequence) or not all(map(_is_count, ahead)):
            message = f"from_state: expected trained_ahead as a list of indices, got {ahead!r}"
            raise ValueError(message)
        if ahead and config.order == "data":
            message = (
                f"from_state: the state was written with order 'completion' and has trained on "
                f"{len(ahead)} groups ahead of others; order 'data' cannot go on from there, so "
                "keep order 'completion'"
            )
            raise ValueError(message)
        if values["groups_per_step"] != config.groups_per_step:
            message = (
                f"from_state: the state was written with groups_per_step "
                f"{values['groups_per_step']}, the configuration has {config.groups_per_step}; "
                f"this would repeat or skip prompts, so keep {values['groups_per_step']}"
            )
            raise ValueError(message)
        if values["trained_version"] > config.num_steps:
            message = (
                f"from_state: the state has {values['trained_version']} steps behind it, the "
                f"configuration has num_steps {config.num_steps}; raise num_steps to go on"
            )
            raise ValueError(message)
        scheduler = cls(config)
        scheduler._trained = values["trained_version"]
        scheduler._published = None
        num_trained = values["trained_version"] * config.groups_per_step
        scheduler._trained_ahead = set(cast("Sequence[int]", ahead))
        first = num_trained - len(scheduler._trained_ahead)
        if scheduler._trained_ahead and min(scheduler._trained_ahead) <= first:
            message = (
                f"from_state: {values['trained_version']} steps of {config.groups_per_step} groups "
                f"and the groups trained ahead, {ahead!r}, do not go together"
            )
            raise ValueError(message)
        scheduler._first_untrained = scheduler._next_index = first
        return scheduler

    def _admissible(self) -> int:
        """Groups that may start now: within the bound, and needed by the run."""
        outstanding = len(self._in_flight) + len(self._waiting) + len(self._in_training)
        trained = self._trained * self.config.groups_per_step
        return min(self.capacity, self.config.num_groups - trained - outstanding)

    def _new_index(self) -> int:
        """The first index that was never admitted; those trained on before a resume are not."""
        while self._next_index in self._trained_ahead:
            self._next_index += 1
        self._next_index += 1
        return self._next_index - 1

    def _next_indices(self) -> list[int] | None:
        """Indices of the next optimizer step in rising order, or None while one is missing."""
        size = self.config.groups_per_step
        if len(self._waiting) < size:
            return None
        if self.config.order == "data":
            indices = self._waiting_by_step.get(self._trained, [])
            return sorted(indices) if len(indices) == size else None
        chosen: list[int] = []
        num_left = 0
        for deadline in sorted(self._num_by_step):
            done = self._waiting_by_step.get(deadline, [])[: size - len(chosen)]
            chosen += done
            num_left += self._num_by_step[deadline] - len(done)
            if num_left > (deadline - self._trained) * size:
                return None
        return sorted(chosen)

    def _forget(self, step: int) -> None:
        """One group less in flight or waiting among those of this step."""
        self._num_by_step[step] -= 1
        if not self._num_by_step[step]:
            del self._num_by_step[step]

    def _check_in_flight(self, action: str, ticket: Ticket) -> None:
        current = self._in_flight.get(ticket.index)
        if current != ticket:
            held = f"in flight is {current}" if current else "it is not in flight"
            message = f"{action}: {ticket} is not a ticket to come back now; {held}"
            raise ValueError(message)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
