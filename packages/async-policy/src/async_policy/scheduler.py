"""When a group may start, and which groups the next optimizer step consumes.

A pure state machine: no clock, no thread, no input or output. Its unit is a group, the samples of
one prompt. Every group has a place in the run's data order, its ``index``, and moves so::

                 admit()             complete()          take_batch()             trained()
    not admitted ───────▶ in flight ───────────▶ waiting ───────────▶ in training ────────▶ trained
                            ▲   │    │
                    admit() │   │    │ complete(keep=False)
                            │   │    └─────────▶ set aside, and a later group takes its place
                            │   │ fail()
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

from typing import Self, final

from async_policy.consumption import Consumption, InCompletionOrder, InDataOrder, Selection
from async_policy.errors import RefillError, VersionError
from async_policy.json_files import JsonValue
from async_policy.saved_state import SavedState
from async_policy.schedule import ReadyGroup, SchedulerConfig, Ticket
from rl_contracts.rollout import PolicyVersion


@final
class Scheduler:
    """The state machine of this module's picture. Deterministic; not to be shared by threads."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start a run at version 0, which trainer and samplers were both built with."""
        self.config = config
        self._trained = 0
        self._published: int | None = 0
        self._next_index = 0
        self._first_unconsumed = 0
        self._consumed_ahead: set[int] = set()  # indices above the first unconsumed one
        self._to_skip: set[int] = set()  # those of them from before a resume, not yet passed
        self._num_trained_groups = 0
        self._num_consumed_aside = 0
        self._to_redo: dict[int, Ticket] = {}
        self._in_flight: dict[int, Ticket] = {}
        self._waiting: dict[int, tuple[Ticket, PolicyVersion]] = {}
        self._in_training: Selection | None = None
        self._consumption = self._begin_at(0)

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
    def num_trained_groups(self) -> int:
        """Groups trained on, by steps that are done."""
        return self._num_trained_groups

    @property
    def num_set_aside(self) -> int:
        """Groups that the caller did not keep, over the whole run.

        Those that the next step would be counted with are sampled again after a resume.
        """
        in_training = len(self.batch_set_aside)
        return self._num_consumed_aside + in_training + self._consumption.num_set_aside

    @property
    def batch_set_aside(self) -> tuple[int, ...]:
        """Indices looked at for the batch in training and set aside, rising."""
        return () if self._in_training is None else self._in_training.set_aside

    @property
    def finished(self) -> bool:
        """Whether every optimizer step of the run is done, or no prompt is left for another."""
        if self._trained == self.config.num_steps:
            return True
        refill = self.config.refill
        if refill is None or refill.incomplete == "raise" or not self._exhausted():
            return False
        none_left = not self._waiting and self._in_training is None
        return none_left and self._consumption.ready(self._trained) is None

    @property
    def capacity(self) -> int:
        """Groups that the staleness bound lets in now, however many the run still needs.

        Never negative; 0 after a restore until the restored version is published.
        """
        if self._published is None:
            return 0
        behind = (self._trained - self._published) * self.config.groups_per_step
        return max(0, self.config.lead_groups - behind - self._occupied())

    @property
    def stall_reason(self) -> str | None:
        """Why the next batch can never become complete unless something is published, or None."""
        if self.finished or self._in_training or self._in_flight or self._admissible():
            return None
        if self._consumption.ready(self._trained) is not None or self._exhausted():
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
            if self._to_redo:
                lost = self._to_redo.pop(min(self._to_redo))
                index, attempt, step = lost.index, lost.attempt + 1, int(lost.step)
            else:
                occupied = self._occupied()
                index, attempt = self._new_index(), 0
                step = self._trained + occupied // self.config.groups_per_step
            published = self._published or 0
            if self.config.order == "completion":
                step = min(published + self.config.max_staleness, self.config.num_steps - 1)
            ticket = Ticket(
                index=index,
                step=PolicyVersion(step),
                admitted_version=PolicyVersion(published),
                attempt=attempt,
            )
            self._in_flight[index] = ticket
            self._consumption.started(ticket)
            tickets.append(ticket)
        return tickets

    def complete(self, ticket: Ticket, oldest_version: PolicyVersion, *, keep: bool = True) -> None:
        """Take note that a group was sampled; `oldest_version` is that of its oldest token.

        Args:
            ticket: the group's.
            oldest_version: version that its oldest token was drawn from.
            keep: False sets the group aside; with a `Refill` a later one takes its place.

        Raises:
            ValueError: if the ticket is not in flight, or nothing would take the group's place.
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
        if not keep and self.config.refill is None:
            message = (
                f"complete: {ticket} is not kept, and without SchedulerConfig.refill no other "
                "group would take its place; set refill"
            )
            raise ValueError(message)
        del self._in_flight[ticket.index]
        if keep:
            self._waiting[ticket.index] = (ticket, oldest_version)
        self._consumption.completed(ticket, keep=keep)

    def fail(self, ticket: Ticket) -> None:
        """Take note that a group was lost. It keeps its place and is redone at the next `admit`.

        Raises:
            ValueError: if the ticket is not in flight.
        """
        self._check_in_flight("fail", ticket)
        del self._in_flight[ticket.index]
        self._consumption.lost(ticket)
        self._to_redo[ticket.index] = ticket

    def take_batch(self) -> tuple[ReadyGroup, ...] | None:
        """The groups of the next optimizer step by index, or None while one is missing.

        Also None when the last prompts of the data were all set aside, and the run is `finished`.

        Raises:
            ValueError: if the step before has not been reported by `trained`, or the run is over.
            RefillError: if the step stays short and `Refill.incomplete` is ``"raise"``, or no
                group was kept of all that may be looked at for a step.
            VersionError: if a group is staler than allowed, which this class exists to prevent.
        """
        if self.finished:
            message = f"take_batch: all {self._trained} steps of the run are done"
            raise ValueError(message)
        if self._in_training is not None:
            message = (
                f"take_batch: the batch of version {self._trained} was taken and is still in "
                f"training; call trained({self._trained + 1}) after its optimizer step"
            )
            raise ValueError(message)
        selection = self._consumption.ready(self._trained)
        if selection is None and self._exhausted():
            selection = self._consumption.rest()
        if selection is None:
            return None
        self._check_filled(selection)
        batch = tuple(
            ReadyGroup(
                ticket=self._waiting[index][0],
                oldest_version=self._waiting[index][1],
                version=self.trained_version,
            )
            for index in selection.chosen
        )
        for group in batch:
            if group.staleness > self.config.max_staleness:
                message = (
                    f"{group.ticket} has staleness {group.staleness}, above max_staleness "
                    f"{self.config.max_staleness}; this is a bug in async-policy"
                )
                raise VersionError(message)
        for index in selection.chosen:
            del self._waiting[index]
        self._consumption.taken(selection)
        self._in_training = selection
        return batch

    def trained(self, version: PolicyVersion) -> None:
        """Take note that the optimizer step on the taken batch is done, and led to `version`.

        Raises:
            ValueError: if no batch was taken, or the version is not one more than before.
        """
        if self._in_training is None:
            message = f"trained({version}): no batch was taken since version {self._trained}"
            raise ValueError(message)
        if version != self._trained + 1:
            message = (
                f"trained({version}): expected version {self._trained + 1}, one optimizer step "
                f"per batch"
            )
            raise ValueError(message)
        self._consumed_ahead.update(self._in_training.chosen, self._in_training.set_aside)
        while self._first_unconsumed in self._consumed_ahead:
            self._consumed_ahead.remove(self._first_unconsumed)
            self._first_unconsumed += 1
        self._num_trained_groups += len(self._in_training.chosen)
        self._num_consumed_aside += len(self._in_training.set_aside)
        self._in_training = None
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

        Groups in flight, waiting or in training have not been trained on, and those set aside for
        a step that is not done are not counted yet; `from_state` admits them all again, in the
        same order, so that each index is consumed exactly once.
        """
        saved = SavedState(
            trained_version=self._trained,
            groups_per_step=self.config.groups_per_step,
            num_trained=self._num_trained_groups,
            num_set_aside=self._num_consumed_aside,
            consumed_ahead=tuple(sorted(self._consumed_ahead)),
        )
        return saved.json()

    @classmethod
    def from_state(cls, state: JsonValue, config: SchedulerConfig) -> Self:
        """Go on from `state`. Nothing is admitted before the restored version is published.

        `num_steps`, `max_staleness` and the bounds of `refill` may differ from the run that wrote
        the state. States of format 2, from before groups could be set aside, are read too.

        Raises:
            ValueError: if the state is not one of `state()`, or `config` cannot go on from it:
                more steps or prompts are behind it than `config` has, or another
                `groups_per_step`, which decides which prompts have been trained on.
        """
        saved = SavedState.read(state)
        saved.check_against(config)
        scheduler = cls(config)
        scheduler._trained = saved.trained_version
        scheduler._published = None
        scheduler._num_trained_groups = saved.num_trained
        scheduler._num_consumed_aside = saved.num_set_aside
        scheduler._consumed_ahead = set(saved.consumed_ahead)
        scheduler._to_skip = set(saved.consumed_ahead)
        scheduler._first_unconsumed = scheduler._next_index = saved.first_unconsumed
        scheduler._consumption = scheduler._begin_at(saved.first_unconsumed)
        return scheduler

    def _begin_at(self, first: int) -> Consumption:
        size, limit = self.config.groups_per_step, self.config.max_candidates
        if self.config.order == "data":
            return InDataOrder(size=size, limit=limit, first=first)
        return InCompletionOrder(size=size, limit=limit)

    def _occupied(self) -> int:
        """Places of steps that are taken by groups before a new one, or can no longer be."""
        in_training = 0 if self._in_training is None else self.config.groups_per_step
        outstanding = len(self._in_flight) + len(self._waiting)
        return in_training + outstanding + self._consumption.missing(self._next_index)

    def _admissible(self) -> int:
        """Groups that may start now: within the bound, needed by the run, and there."""
        needed = (
            self.config.num_steps - self._trained
        ) * self.config.groups_per_step - self._occupied()
        return max(0, min(self.capacity, needed, len(self._to_redo) + self._num_prompts_left()))

    def _num_prompts_left(self) -> int:
        """Places of the data order that were never admitted."""
        return self.config.max_prompts - self._next_index - len(self._to_skip)

    def _exhausted(self) -> bool:
        """Whether nothing more will come for the next step: the data has ended."""
        at_work = self._in_flight or self._to_redo
        return self.config.refill is not None and not at_work and self._num_prompts_left() == 0

    def _new_index(self) -> int:
        """The first index that was never admitted; those consumed before a resume are not."""
        while self._next_index in self._to_skip:
            self._to_skip.remove(self._next_index)
            self._next_index += 1
        self._next_index += 1
        return self._next_index - 1

    def _check_filled(self, selection: Selection) -> None:
        """Refuse a step that stays short, unless that is what was asked for."""
        refill, size = self.config.refill, self.config.groups_per_step
        num_chosen, num_aside = len(selection.chosen), len(selection.set_aside)
        if refill is None or num_chosen == size or (num_chosen and refill.incomplete == "yield"):
            return
        num_candidates = num_chosen + num_aside
        found = (
            f"{num_chosen} of the {size} groups needed: {num_aside} of {num_candidates} "
            f"candidates ({num_aside / max(1, num_candidates):.0%}) were set aside"
        )
        limit = self.config.max_candidates
        if limit is not None and num_candidates >= limit:
            message = (
                f"step {self._trained}: {refill.max_rounds} rounds of {size} groups gave {found}; "
                "use prompts of a difficulty that the policy sometimes solves, a larger group, or "
                "a larger refill.max_rounds"
            )
            raise RefillError(message)
        message = (
            f"step {self._trained}: the {self.config.max_prompts} prompts of the run ended with "
            f"{found}; add prompts, take fewer steps, or set refill.incomplete to 'yield'"
        )
        raise RefillError(message)

    def _check_in_flight(self, action: str, ticket: Ticket) -> None:
        current = self._in_flight.get(ticket.index)
        if current != ticket:
            held = f"in flight is {current}" if current else "it is not in flight"
            message = f"{action}: {ticket} is not a ticket to come back now; {held}"
            raise ValueError(message)
