"""Dynamic sampling: steps of kept groups only, the rest counted once, within every bound."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings, strategies as st

from async_policy import (
    ConsumptionOrder,
    Refill,
    RefillError,
    Scheduler,
    SchedulerConfig,
)
from rl_contracts.rollout import PolicyVersion

Step = tuple[tuple[int, ...], tuple[int, ...]]
"""Indices trained on, and those set aside, for one step."""


def version(number: int) -> PolicyVersion:
    return PolicyVersion(number)


@dataclass
class World:
    """Samplers, a trainer and a disk around a scheduler; `kept` says which groups teach something.

    Beyond its end the list of `kept` begins again.
    """

    scheduler: Scheduler
    kept: Sequence[bool]
    steps: list[Step] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    in_training: Step | None = None
    error: str | None = None

    @property
    def over(self) -> bool:
        return self.error is not None or self.scheduler.finished

    def admit(self) -> None:
        for ticket in self.scheduler.admit():
            assert ticket.index < self.scheduler.config.max_prompts

    def complete(self, choice: int, lag: int = 0) -> None:
        tickets = self.scheduler.in_flight
        if tickets:
            ticket = tickets[choice % len(tickets)]
            newest = self.scheduler.trained_version
            oldest = ticket.admitted_version + lag % (newest - ticket.admitted_version + 1)
            keep = self.kept[ticket.index % len(self.kept)]
            self.scheduler.complete(ticket, version(oldest), keep=keep)

    def lose(self, choice: int) -> None:
        tickets = self.scheduler.in_flight
        if tickets:
            self.scheduler.fail(tickets[choice % len(tickets)])

    def take(self) -> None:
        if self.in_training is not None or self.over:
            return
        try:
            batch = self.scheduler.take_batch()
        except RefillError as error:
            self.error = str(error)
            return
        if batch is not None:
            indices = tuple(group.ticket.index for group in batch)
            assert all(group.ticket.step >= group.version for group in batch)
            self.in_training = (indices, self.scheduler.batch_set_aside)
            self.staleness += [group.staleness for group in batch]

    def train(self) -> None:
        if self.in_training is not None:
            self.scheduler.trained(version(self.scheduler.trained_version + 1))
            self.steps.append(self.in_training)
            self.in_training = None

    def publish(self, choice: int) -> None:
        trained, published = self.scheduler.trained_version, self.scheduler.published_version
        lowest = trained if published is None else published
        self.scheduler.published(version(lowest + choice % (trained - lowest + 1)))

    def publish_newest(self) -> None:
        self.scheduler.published(self.scheduler.trained_version)

    def die_and_resume(self) -> None:
        text = json.dumps(self.scheduler.state())
        self.scheduler = Scheduler.from_state(json.loads(text), self.scheduler.config)
        self.in_training = None

    def act(self, action: int, choice: int) -> None:
        if self.error is not None:
            return
        match action:
            case 0 | 1:
                self.admit()
            case 2 | 3 | 4:
                self.complete(choice, choice // 7)
            case 5:
                self.lose(choice)
            case 6 | 7:
                self.take()
            case 8 | 9:
                self.train()
            case 10 | 11:
                self.publish(choice)
            case _:
                self.die_and_resume()

    def finish(self) -> None:
        """Let everybody do their work; what is possible must be enough to end the run."""
        for _ in range(4 * self.scheduler.config.max_prompts + 4):
            if self.over:
                return
            self.publish_newest()
            self.admit()
            self.complete(0)
            self.take()
            self.train()
        message = f"locked up: {self.scheduler.stall_reason}"
        raise AssertionError(message)


def one_after_the_other(config: SchedulerConfig, kept: Sequence[bool]) -> tuple[list[Step], bool]:
    """The steps of a run in data order, by a loop that looks at one group at a time.

    Also whether the run ends in an error.
    """
    assert config.refill is not None
    steps: list[Step] = []
    index = 0
    while len(steps) < config.num_steps:
        chosen: list[int] = []
        aside: list[int] = []
        limit = config.max_candidates or config.max_prompts + 1
        while len(chosen) < config.groups_per_step and len(chosen) + len(aside) < limit:
            if index == config.max_prompts:
                break
            (chosen if kept[index % len(kept)] else aside).append(index)
            index += 1
        if len(chosen) < config.groups_per_step:
            at_end = index == config.max_prompts and len(chosen) + len(aside) < limit
            if config.refill.incomplete == "raise":
                return steps, True
            if not chosen:
                return steps, not at_end
        steps.append((tuple(chosen), tuple(aside)))
        if index == config.max_prompts:
            break
    short = config.refill.incomplete == "raise" and len(steps) < config.num_steps
    return steps, short


def schedules() -> st.SearchStrategy[SchedulerConfig]:
    """Any schedule with a refill, in either order, with and without an end of the data."""

    def build(  # noqa: PLR0917 -- the strategies in order
        num_steps: int,
        size: int,
        max_staleness: int,
        less: int,
        order: ConsumptionOrder,
        rounds: int,
        incomplete: Literal["yield", "raise"],
        prompts: int,
    ) -> SchedulerConfig:
        lead = (max_staleness + 1) * size - less % size
        least = num_steps * size if incomplete == "raise" else 1
        num_prompts = least + prompts if prompts % 3 or not rounds else None
        return SchedulerConfig(
            num_steps=num_steps,
            groups_per_step=size,
            max_staleness=max_staleness,
            max_lead_groups=lead if less and max_staleness else None,
            order=order if max_staleness else "data",
            refill=Refill(
                max_rounds=rounds or None, incomplete=incomplete, num_prompts=num_prompts
            ),
        )

    return st.builds(
        build,
        st.integers(1, 5),
        st.integers(1, 4),
        st.integers(0, 3),
        st.integers(0, 3),
        st.sampled_from(("data", "completion")),
        st.integers(0, 4),
        st.sampled_from(("yield", "raise")),
        st.integers(0, 40),
    )


@settings(max_examples=1000, deadline=None)
@given(
    config=schedules(),
    kept=st.lists(st.booleans(), min_size=1, max_size=30),
    actions=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 60)), max_size=120),
)
def test_any_schedule_consumes_each_prompt_once_and_within_the_bound(
    config: SchedulerConfig, kept: list[bool], actions: list[tuple[int, int]]
) -> None:
    """Random latencies, losses, publishes, deaths and groups that teach nothing.

    Staleness stays within the bound, every prompt is trained on or set aside once, nothing locks
    up, and in data order the steps are those of a loop that looks at one group at a time.
    """
    world = World(Scheduler(config), kept)
    for action, choice in actions:
        world.act(action, choice)
    world.finish()
    consumed = [index for step in world.steps for part in step for index in part]
    assert len(set(consumed)) == len(consumed)
    assert all(0 <= staleness <= config.max_staleness for staleness in world.staleness)
    for chosen, aside in world.steps:
        assert all(kept[index % len(kept)] for index in chosen)
        assert not any(kept[index % len(kept)] for index in aside)
        if config.max_candidates is not None:
            ahead = config.lead_groups - config.groups_per_step if config.order != "data" else 0
            assert len(chosen) + len(aside) <= config.max_candidates + ahead
    scheduler = world.scheduler
    assert scheduler.num_trained_groups == sum(len(chosen) for chosen, _ in world.steps)
    assert scheduler.num_set_aside >= sum(len(aside) for _, aside in world.steps)
    if config.order == "data":
        steps, error = one_after_the_other(config, kept)
        assert world.steps == steps
        assert (world.error is not None) == error
        assert consumed == [] or sorted(consumed) == list(range(max(consumed) + 1))


def test_a_step_goes_on_until_it_has_its_groups() -> None:
    """Groups 0, 2 and 3 teach nothing: steps of two train on 1 and 4, then on 5 and 6."""
    config = SchedulerConfig(
        num_steps=2, groups_per_step=2, refill=Refill(max_rounds=3, incomplete="raise")
    )
    world = World(Scheduler(config), [False, True, False, False, True, True, True])
    world.finish()
    assert world.steps == [((1, 4), (0, 2, 3)), ((5, 6), ())]
    assert world.scheduler.num_set_aside == 3
    assert world.scheduler.state() == {
        "format": 3,
        "trained_version": 2,
        "groups_per_step": 2,
        "num_trained": 4,
        "num_set_aside": 3,
        "consumed_ahead": [],
    }


def test_a_policy_without_signal_ends_in_an_error_after_three_rounds() -> None:
    """A21: every group uniform, limit 3 rounds of 2: exactly 6 are sampled, then the share."""
    config = SchedulerConfig(
        num_steps=5, groups_per_step=2, refill=Refill(max_rounds=3, incomplete="raise")
    )
    scheduler = Scheduler(config)
    sampled = []
    while tickets := scheduler.admit():
        for ticket in tickets:
            assert scheduler.take_batch() is None
            scheduler.complete(ticket, version(0), keep=False)
            sampled.append(ticket.index)
    assert sampled == [0, 1, 2, 3, 4, 5]
    with pytest.raises(
        RefillError,
        match=r"step 0: 3 rounds of 2 groups gave 0 of the 2 groups needed: 6 of 6 candidates "
        r"\(100%\) were set aside; use prompts of a difficulty .* refill.max_rounds",
    ):
        scheduler.take_batch()
    assert scheduler.num_set_aside == 6


def test_a_short_step_is_trained_on_if_asked_for() -> None:
    """Limit 2 rounds of 2 with one good group in four: steps of one group each, in order."""
    config = SchedulerConfig(
        num_steps=2,
        groups_per_step=2,
        max_staleness=1,
        refill=Refill(max_rounds=2, incomplete="yield"),
    )
    world = World(Scheduler(config), [False, False, True, False])
    world.finish()
    assert world.steps == [((2,), (0, 1, 3)), ((6,), (4, 5, 7))]


def test_the_end_of_the_data_is_an_error_or_a_short_step() -> None:
    """Five prompts, of which 0 teaches nothing, for steps of two: 1 2, 3 4, and no third."""
    kept = [False, True, True, True, True, False]
    world = World(Scheduler(SchedulerConfig(num_steps=9, groups_per_step=2, refill=Refill(
        max_rounds=None, incomplete="yield", num_prompts=4
    ))), kept)  # fmt: skip
    world.finish()
    assert world.steps == [((1, 2), (0,)), ((3,), ())]
    assert world.scheduler.finished
    with pytest.raises(ValueError, match="all 2 steps of the run are done"):
        world.scheduler.take_batch()
    strict = World(Scheduler(SchedulerConfig(num_steps=3, groups_per_step=2, refill=Refill(
        max_rounds=None, incomplete="raise", num_prompts=6
    ))), kept)  # fmt: skip
    strict.finish()
    assert strict.error is not None
    assert strict.error.startswith(
        "step 2: the 6 prompts of the run ended with 0 of the 2 groups needed: 1 of 1 candidates "
        "(100%) were set aside; add prompts"
    )


def test_what_was_set_aside_at_the_end_is_counted() -> None:
    """Three prompts that all teach nothing: no step, no error with ``yield``, all counted."""
    world = World(Scheduler(SchedulerConfig(num_steps=1, groups_per_step=2, refill=Refill(
        max_rounds=9, incomplete="yield", num_prompts=3
    ))), [False])  # fmt: skip
    world.finish()
    assert (world.steps, world.error) == ([], None)
    assert world.scheduler.num_set_aside == 3


def test_setting_a_group_aside_lets_the_next_prompt_in_at_once() -> None:
    """Its place is free before the slow group 0 is there; the bound on the lead does not move."""
    config = SchedulerConfig(
        num_steps=3,
        groups_per_step=2,
        max_staleness=1,
        refill=Refill(max_rounds=3, incomplete="raise"),
    )
    scheduler = Scheduler(config)
    tickets = scheduler.admit()
    assert [ticket.index for ticket in tickets] == [0, 1, 2, 3]
    assert scheduler.capacity == 0
    scheduler.complete(tickets[1], version(0), keep=False)
    assert [(ticket.index, ticket.step) for ticket in scheduler.admit()] == [(4, 1)]


def test_the_lead_shrinks_where_a_step_can_no_longer_be_full() -> None:
    """Limit 1 round of 2, staleness 1: setting 0 aside frees no place, since step 0 stays short.

    Without that, group 4 would start under version 0 and be consumed by step 2.
    """
    config = SchedulerConfig(
        num_steps=9,
        groups_per_step=2,
        max_staleness=1,
        refill=Refill(max_rounds=1, incomplete="yield"),
    )
    scheduler = Scheduler(config)
    tickets = scheduler.admit()
    scheduler.complete(tickets[0], version(0), keep=False)
    assert scheduler.admit() == []
    scheduler.complete(tickets[1], version(0))
    batch = scheduler.take_batch()
    assert batch is not None
    assert [group.ticket.index for group in batch] == [1]
    scheduler.trained(version(1))
    assert scheduler.admit() == []
    scheduler.published(version(1))
    assert [(ticket.index, ticket.step) for ticket in scheduler.admit()] == [(4, 2), (5, 2)]


def test_settings_that_cannot_work_are_refused() -> None:
    """No bound at all, too few prompts, or a group set aside with nothing to take its place."""
    with pytest.raises(ValueError, match="would sample for ever; give one of them"):
        Refill(max_rounds=None, incomplete="raise")
    few = Refill(max_rounds=None, incomplete="raise", num_prompts=7)
    with pytest.raises(ValueError, match=r"num_prompts = 7 are fewer than the 8 groups of 4 steps"):
        SchedulerConfig(num_steps=4, groups_per_step=2, refill=few)
    scheduler = Scheduler(SchedulerConfig(num_steps=1, groups_per_step=1))
    (ticket,) = scheduler.admit()
    with pytest.raises(ValueError, match=r"group 0 \(step 0\) is not kept, .* set refill"):
        scheduler.complete(ticket, version(0), keep=False)


def test_restore_with_another_refill() -> None:
    """A run may begin to set groups aside when it is resumed, and not stop again."""
    plain = SchedulerConfig(num_steps=3, groups_per_step=2)
    refilled = SchedulerConfig(
        num_steps=3, groups_per_step=2, refill=Refill(max_rounds=2, incomplete="yield")
    )
    world = World(Scheduler(plain), [True])
    world.admit()
    world.complete(0)
    world.complete(0)
    world.take()
    world.train()
    going_on = World(Scheduler.from_state(world.scheduler.state(), refilled), [True, False])
    going_on.finish()
    assert going_on.steps == [((2, 4), (3,)), ((6, 8), (5, 7))]
    with pytest.raises(ValueError, match=r"set 3 groups aside; without refill .* keep refill"):
        Scheduler.from_state(going_on.scheduler.state(), plain)
    few = SchedulerConfig(
        num_steps=9,
        groups_per_step=2,
        refill=Refill(max_rounds=2, incomplete="yield", num_prompts=5),
    )
    with pytest.raises(ValueError, match=r"has 9 prompts behind it, .* lets the run use 5"):
        Scheduler.from_state(going_on.scheduler.state(), few)


def test_fewer_rounds_on_resume_do_not_end_the_run_early() -> None:
    """A step looked at 6 groups; one round for each of 4 would leave 2 prompts for three steps."""
    rounds = [
        SchedulerConfig(
            num_steps=4, groups_per_step=2, refill=Refill(max_rounds=n, incomplete="yield")
        )
        for n in (3, 1)
    ]
    world = World(Scheduler(rounds[0]), [False, False, True])
    while len(world.steps) < 1:
        world.act(0, 0)
        world.act(2, 0)
        world.act(6, 0)
        world.act(8, 0)
        world.publish_newest()
    assert world.steps == [((2, 5), (0, 1, 3, 4))]
    with pytest.raises(ValueError, match=r"6 prompts behind it, .* the 8 .* 2 are left for the 6"):
        Scheduler.from_state(world.scheduler.state(), rounds[1])
    Scheduler.from_state(world.scheduler.state(), rounds[0])


@pytest.mark.parametrize("incomplete", ["yield", "raise"])
def test_groups_looked_at_ahead_do_not_end_the_run_early(
    incomplete: Literal["yield", "raise"],
) -> None:
    """Completion order, limit 1 round of 2, a lead of 4: the first two steps look at 4 groups each.

    With the 2 of the last step the run needs 10 prompts, more than 3 steps of 1 round.
    """
    config = SchedulerConfig(
        num_steps=3,
        groups_per_step=2,
        max_staleness=1,
        order="completion",
        refill=Refill(max_rounds=1, incomplete=incomplete),
    )
    assert config.max_prompts == 12
    half = [False, False, True, True]
    world = World(Scheduler(config), [*half, *half, True, True])
    while not world.over:
        world.admit()
        for _ in range(4):
            world.complete(0)
        world.take()
        world.train()
        world.publish_newest()
    assert world.error is None
    assert world.steps == [((2, 3), (0, 1)), ((6, 7), (4, 5)), ((8, 9), ())]


def test_a_slow_group_does_not_let_the_others_be_sampled_for_ever() -> None:
    """Completion order, limit 1 round of 2, a lead of 4: with 1, 2 and 3 set aside nothing starts.

    Group 0 may still be good; the step has looked at 3 groups, one more than its limit of 2.
    """
    config = SchedulerConfig(
        num_steps=9,
        groups_per_step=2,
        max_staleness=1,
        order="completion",
        refill=Refill(max_rounds=1, incomplete="yield"),
    )
    scheduler = Scheduler(config)
    for ticket in scheduler.admit()[1:]:
        scheduler.complete(ticket, version(0), keep=False)
        assert scheduler.admit() == []
    (slow,) = scheduler.in_flight
    scheduler.complete(slow, version(0))
    batch = scheduler.take_batch()
    assert batch is not None
    assert ([group.ticket.index for group in batch], scheduler.batch_set_aside) == ([0], (1, 2, 3))
    scheduler.trained(version(1))
    scheduler.published(version(1))
    assert [ticket.index for ticket in scheduler.admit()] == [4, 5, 6, 7]
