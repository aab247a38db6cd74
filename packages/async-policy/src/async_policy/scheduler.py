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
sampler runs, at least. A group with index ``i`` is consumed by step ``i // groups_per_step``, in
admission order, without exception: nothing is dropped and nothing overtakes.

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

    Counting from the versions, not from counters of accepted groups, keeps the capacity right
    after a restore (areal-project/AReaL#1388: a restored version beside fresh counters gave
    816 instead of 16).

Why it cannot lock up
    The next step needs the indices below ``(t + 1) * B``; all of them are admissible as soon as
    ``t - p <= k``. Otherwise the trainer is ahead of the samplers by more than ``k``, and
    `Scheduler.stall_reason` says which version must be published.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, final

import attrs

from async_policy.errors import VersionError
from async_policy.json_files import JsonValue
from rl_contracts.rollout import PolicyVersion

STATE_FORMAT = 1


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

    @property
    def num_groups(self) -> int:
        """Groups of the whole run: each of these indices is trained on exactly once."""
        return self.num_steps * self.groups_per_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Leave to sample one group."""

    index: int
    """Place in the run's data order, from 0: which prompt, and what to derive its seed from."""

    step: PolicyVersion
    """Trained version that will consume the group."""

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

    @property
    def staleness(self) -> int:
        """Optimizer steps between its oldest token and the weights that consume it."""
        return self.ticket.step - self.oldest_version


@final
class Scheduler:
    """The state machine of this module's picture. Deterministic; not to be shared by threads."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start a run at version 0, which trainer and samplers were both built with."""
        self.config = config
        self._trained = 0
        self._published: int | None = 0
        self._next_index = 0
        self._attempts_to_redo: dict[int, int] = {}
        self._in_flight: dict[int, Ticket] = {}
        self._waiting: dict[int, ReadyGroup] = {}
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
        lead = self._published - self._trained + self.config.max_staleness + 1
        outstanding = len(self._in_flight) + len(self._waiting) + len(self._in_training)
        return max(0, lead * self.config.groups_per_step - outstanding)

    @property
    def stall_reason(self) -> str | None:
        """Why the next batch can never become complete unless something is published, or None."""
        if self.finished or self._in_training or self._in_flight or self._admissible():
            return None
        if self._next_batch_is_complete():
            return None
        if self._published is None:
            return (
                f"the run was restored at version {self._trained} and no sampler has been given "
                f"these weights; publish version {self._trained} first"
            )
        return (
            f"the samplers run version {self._published}, the trainer has version {self._trained}, "
            f"and max_staleness is {self.config.max_staleness}: nothing may be sampled until "
            f"version {self._trained - self.config.max_staleness} or later is published"
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
                index, attempt = self._next_index, 0
                self._next_index += 1
            ticket = Ticket(
                index=index,
                step=PolicyVersion(index // self.config.groups_per_step),
                admitted_version=PolicyVersion(self._published or 0),
                attempt=attempt,
            )
            self._in_flight[index] = ticket
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
        self._waiting[ticket.index] = ReadyGroup(ticket=ticket, oldest_version=oldest_version)

    def fail(self, ticket: Ticket) -> None:
        """Take note that a group was lost. It keeps its place and is redone at the next `admit`.

        Raises:
            ValueError: if the ticket is not in flight.
        """
        self._check_in_flight("fail", ticket)
        del self._in_flight[ticket.index]
        self._attempts_to_redo[ticket.index] = ticket.attempt + 1

    def take_batch(self) -> tuple[ReadyGroup, ...] | None:
        """The groups of the next optimizer step in data order, or None while one is missing.

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
        if not self._next_batch_is_complete():
            return None
        batch = tuple(self._waiting[index] for index in self._next_indices())
        for group in batch:
            if group.staleness > self.config.max_staleness:
                message = (
                    f"{group.ticket} has staleness {group.staleness}, above max_staleness "
                    f"{self.config.max_staleness}; this is a bug in async-policy"
                )
                raise VersionError(message)
        for group in batch:
            del self._waiting[group.ticket.index]
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
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                message = f"from_state: expected {name} as an int of at least 0, got {value!r}"
                raise ValueError(message)
            values[name] = value
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
        scheduler._next_index = values["trained_version"] * config.groups_per_step
        return scheduler

    def _admissible(self) -> int:
        """Groups that may start now: within the bound, and needed by the run."""
        needed = self.config.num_groups - self._next_index + len(self._attempts_to_redo)
        return min(self.capacity, needed)

    def _next_indices(self) -> range:
        """Data-order indices of the next optimizer step."""
        start = self._trained * self.config.groups_per_step
        return range(start, start + self.config.groups_per_step)

    def _next_batch_is_complete(self) -> bool:
        if len(self._waiting) < self.config.groups_per_step:
            return False
        return all(index in self._waiting for index in self._next_indices())

    def _check_in_flight(self, action: str, ticket: Ticket) -> None:
        current = self._in_flight.get(ticket.index)
        if current != ticket:
            held = f"in flight is {current}" if current else "it is not in flight"
            message = f"{action}: {ticket} is not a ticket to come back now; {held}"
            raise ValueError(message)
