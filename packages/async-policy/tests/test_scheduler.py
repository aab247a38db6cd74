"""The scheduler: capacity by hand, the bound and the order under random schedules, restores."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from async_policy import (
    ConsumptionOrder,
    JsonValue,
    Scheduler,
    SchedulerConfig,
    Ticket,
    VersionError,
)
from rl_contracts.rollout import PolicyVersion


def version(number: int) -> PolicyVersion:
    return PolicyVersion(number)


def restored(trained_version: int, config: SchedulerConfig) -> Scheduler:
    state: JsonValue = {
        "format": 2,  # of the first release; read as well
        "trained_version": trained_version,
        "groups_per_step": config.groups_per_step,
        "trained_ahead": [],
    }
    return Scheduler.from_state(state, config)


def sample_all(scheduler: Scheduler) -> list[int]:
    """Admit and complete whatever may start, with the weights that were published."""
    tickets = scheduler.admit()
    for ticket in tickets:
        scheduler.complete(ticket, ticket.admitted_version)
    return [ticket.index for ticket in tickets]


def test_capacity_after_a_restore_counts_from_the_versions() -> None:
    """A41: staleness 1, version 100 restored, 8 groups a step, nothing sampled: 16, not 816."""
    scheduler = restored(100, SchedulerConfig(num_steps=1000, groups_per_step=8, max_staleness=1))
    scheduler.published(version(100))
    assert scheduler.capacity == 16
    assert [ticket.index for ticket in scheduler.admit()] == list(range(800, 816))
    assert scheduler.capacity == 0


def test_capacity_by_hand_through_one_step_off() -> None:
    """Staleness 1, 2 groups a step: capacity 4, 0 while they are out, and 2 per publish."""
    scheduler = Scheduler(SchedulerConfig(num_steps=5, groups_per_step=2, max_staleness=1))
    assert scheduler.capacity == 4
    assert sample_all(scheduler) == [0, 1, 2, 3]
    assert scheduler.capacity == 0
    batch = scheduler.take_batch()
    assert batch is not None
    assert [group.ticket.index for group in batch] == [0, 1]
    assert scheduler.capacity == 0
    scheduler.trained(version(1))
    assert scheduler.capacity == 0
    scheduler.published(version(1))
    assert scheduler.capacity == 2
    assert sample_all(scheduler) == [4, 5]
    batch = scheduler.take_batch()
    assert batch is not None
    assert [group.staleness for group in batch] == [1, 1]


def test_synchronous_admits_nothing_between_take_and_publish() -> None:
    """Staleness 0: capacity is 0 while a batch trains and until its weights are published."""
    scheduler = Scheduler(SchedulerConfig(num_steps=2, groups_per_step=3))
    assert sample_all(scheduler) == [0, 1, 2]
    assert scheduler.take_batch() is not None
    assert scheduler.admit() == []
    scheduler.trained(version(1))
    assert scheduler.admit() == []
    scheduler.published(version(1))
    assert [ticket.index for ticket in scheduler.admit()] == [3, 4, 5]


def test_never_admits_more_than_the_run_needs() -> None:
    """Two steps of 2 groups with staleness 9: 4 groups start, though 20 would be fresh enough."""
    scheduler = Scheduler(SchedulerConfig(num_steps=2, groups_per_step=2, max_staleness=9))
    assert scheduler.capacity == 20
    assert len(scheduler.admit()) == 4
    assert scheduler.admit() == []


def test_publishing_every_third_step_needs_staleness_two() -> None:
    """A run that publishes at versions 3, 6, ... ends with staleness 2 and stalls with 1."""

    def run(max_staleness: int) -> Scheduler:
        scheduler = Scheduler(
            SchedulerConfig(num_steps=6, groups_per_step=1, max_staleness=max_staleness)
        )
        while not scheduler.finished and scheduler.stall_reason is None:
            sample_all(scheduler)
            if scheduler.take_batch() is not None:
                scheduler.trained(version(scheduler.trained_version + 1))
                if scheduler.trained_version % 3 == 0:
                    scheduler.published(scheduler.trained_version)
        return scheduler

    assert run(2).finished
    stalled = run(1)
    assert stalled.trained_version == 2
    assert stalled.stall_reason == (
        "the samplers run version 0, the trainer has version 2, and max_staleness is 1: the batch "
        "cannot be completed until version 1 or later is published"
    )


def test_lost_group_is_redone_first_and_keeps_its_place() -> None:
    """A group that failed is admitted before new ones, with its index and a higher attempt."""
    scheduler = Scheduler(SchedulerConfig(num_steps=9, groups_per_step=2, max_staleness=1))
    tickets = scheduler.admit()
    scheduler.fail(tickets[3])
    scheduler.fail(tickets[1])
    again = scheduler.admit()
    assert [(ticket.index, ticket.attempt) for ticket in again] == [(1, 1), (3, 1)]
    for ticket in (tickets[0], tickets[2], *again):
        scheduler.complete(ticket, version(0))
    batch = scheduler.take_batch()
    assert batch is not None
    assert [group.ticket.index for group in batch] == [0, 1]


def test_a_late_answer_to_an_attempt_that_was_given_up_is_refused() -> None:
    """The first attempt's result is refused once the group was declared lost: no double count."""
    scheduler = Scheduler(SchedulerConfig(num_steps=1, groups_per_step=1))
    (first,) = scheduler.admit()
    scheduler.fail(first)
    with pytest.raises(ValueError, match=r"group 0 \(step 0\) is not .*; it is not in flight"):
        scheduler.complete(first, version(0))
    (second,) = scheduler.admit()
    with pytest.raises(ValueError, match=r"in flight is group 0 \(step 0, attempt 1\)"):
        scheduler.complete(first, version(0))
    scheduler.complete(second, version(0))
    with pytest.raises(ValueError, match="it is not in flight"):
        scheduler.complete(second, version(0))
    with pytest.raises(ValueError, match=r"fail: .* it is not in flight"):
        scheduler.fail(second)


def test_sampler_with_older_weights_than_published_is_found() -> None:
    """A completion from version 0 is refused if version 1 was published before admission."""
    scheduler = Scheduler(SchedulerConfig(num_steps=3, groups_per_step=1))
    sample_all(scheduler)
    scheduler.take_batch()
    scheduler.trained(version(1))
    scheduler.published(version(1))
    (ticket,) = scheduler.admit()
    with pytest.raises(
        VersionError, match=r"ran version 1 or later, but its oldest token is from version 0"
    ):
        scheduler.complete(ticket, version(0))
    with pytest.raises(VersionError, match=r"reports version 2, but .* only reached version 1"):
        scheduler.complete(ticket, version(2))
    scheduler.complete(ticket, version(1))


def test_stale_group_at_consumption_raises() -> None:
    """The bound is checked where it counts: a group that is too old never becomes a batch."""
    scheduler = Scheduler(SchedulerConfig(num_steps=3, groups_per_step=1, max_staleness=0))
    sample_all(scheduler)
    scheduler.take_batch()
    scheduler.trained(version(1))
    scheduler.published(version(1))
    sample_all(scheduler)
    scheduler._waiting[1] = (scheduler._waiting[1][0], version(0))
    with pytest.raises(VersionError, match="has staleness 1, above max_staleness 0"):
        scheduler.take_batch()


def test_wrong_order_of_calls_is_named() -> None:
    """Steps are reported one by one, batches one at a time, versions only upwards."""
    scheduler = Scheduler(SchedulerConfig(num_steps=2, groups_per_step=1, max_staleness=1))
    with pytest.raises(ValueError, match=r"trained\(1\): no batch was taken since version 0"):
        scheduler.trained(version(1))
    with pytest.raises(ValueError, match=r"publish 1: expected version 0;"):
        scheduler.published(version(1))
    sample_all(scheduler)
    scheduler.take_batch()
    with pytest.raises(ValueError, match=r"still in training; call trained\(1\)"):
        scheduler.take_batch()
    with pytest.raises(ValueError, match=r"trained\(2\): expected version 1"):
        scheduler.trained(version(2))
    scheduler.trained(version(1))
    scheduler.published(version(1))
    with pytest.raises(ValueError, match=r"publish 0: expected version 1;"):
        scheduler.published(version(0))
    scheduler.take_batch()
    scheduler.trained(version(2))
    with pytest.raises(ValueError, match="all 2 steps of the run are done"):
        scheduler.take_batch()


def test_restored_run_samples_nothing_before_its_weights_are_published() -> None:
    """After a restore the samplers are new: capacity 0 and a reason, until version 4 is out."""
    scheduler = restored(4, SchedulerConfig(num_steps=9, groups_per_step=2, max_staleness=3))
    assert scheduler.published_version is None
    assert scheduler.admit() == []
    assert scheduler.stall_reason is not None
    assert scheduler.stall_reason.endswith("publish version 4 first")
    with pytest.raises(ValueError, match=r"publish 3: expected version 4;"):
        scheduler.published(version(3))
    scheduler.published(version(4))
    assert scheduler.stall_reason is None
    assert scheduler.admit()[0] == Ticket(
        index=8, step=version(4), admitted_version=version(4), attempt=0
    )


def test_restore_with_settings_that_would_break_the_order_is_refused() -> None:
    """Another groups_per_step, too few steps, or a state that is not one: each is named."""
    state = Scheduler(SchedulerConfig(num_steps=2, groups_per_step=4)).state()
    with pytest.raises(ValueError, match=r"written with groups_per_step 4, .* has 8; .* keep 4"):
        Scheduler.from_state(state, SchedulerConfig(num_steps=2, groups_per_step=8))
    with pytest.raises(ValueError, match=r"has 5 steps behind it, .* has num_steps 4"):
        restored(5, SchedulerConfig(num_steps=4, groups_per_step=1))
    with pytest.raises(ValueError, match=r"expected a scheduler state of format 2 or 3, got \[1\]"):
        Scheduler.from_state([1], SchedulerConfig(num_steps=1, groups_per_step=1))
    with pytest.raises(ValueError, match=r"expected trained_version as an int .* got 'x'"):
        Scheduler.from_state(
            {"format": 2, "trained_version": "x"}, SchedulerConfig(num_steps=1, groups_per_step=1)
        )


@pytest.mark.parametrize("name", ["num_steps", "groups_per_step", "max_staleness"])
def test_config_bounds(name: str) -> None:
    """Steps and groups start at 1, staleness at 0."""
    values = {"num_steps": 1, "groups_per_step": 1, "max_staleness": 0}
    with pytest.raises(ValueError, match=f"'{name}' must be >= "):
        SchedulerConfig(**(values | {name: values[name] - 1}))  # type: ignore[arg-type]


@dataclass
class World:
    """Samplers, a trainer and a disk around a scheduler, all as unkind as allowed."""

    scheduler: Scheduler
    consumed: list[int] = field(default_factory=list)
    in_training: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    def complete(self, choice: int, lag: int) -> None:
        """Any group in flight ends, its oldest token from any version it may be from."""
        tickets = self.scheduler.in_flight
        if tickets:
            ticket = tickets[choice % len(tickets)]
            newest = self.scheduler.trained_version
            oldest = ticket.admitted_version + lag % (newest - ticket.admitted_version + 1)
            self.scheduler.complete(ticket, version(oldest))

    def lose(self, choice: int) -> None:
        tickets = self.scheduler.in_flight
        if tickets:
            self.scheduler.fail(tickets[choice % len(tickets)])

    def take(self) -> None:
        if self.in_training or self.scheduler.finished:
            return
        batch = self.scheduler.take_batch()
        if batch is not None:
            self.in_training = [group.ticket.index for group in batch]
            self.staleness += [group.staleness for group in batch]

    def train(self) -> None:
        if self.in_training:
            self.scheduler.trained(version(self.scheduler.trained_version + 1))
            self.consumed += self.in_training
            self.in_training = []

    def publish(self, choice: int) -> None:
        """Any version from the published to the trained one; the restored one after a restore."""
        trained, published = self.scheduler.trained_version, self.scheduler.published_version
        lowest = trained if published is None else published
        self.scheduler.published(version(lowest + choice % (trained - lowest + 1)))

    def die_and_resume(self) -> None:
        """What was not trained on is lost; a JSON text is all that is left."""
        text = json.dumps(self.scheduler.state())
        self.scheduler = Scheduler.from_state(json.loads(text), self.scheduler.config)
        self.in_training = []

    def act(self, action: int, choice: int) -> None:
        match action:
            case 0 | 1:
                self.scheduler.admit()
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
        for _ in range(4 * self.scheduler.config.num_groups + 4):
            self.publish(self.scheduler.trained_version)
            self.scheduler.published(self.scheduler.trained_version)
            self.scheduler.admit()
            self.complete(0, 0)
            self.take()
            self.train()


def schedules() -> st.SearchStrategy[SchedulerConfig]:
    """Any schedule, with and without a bound that is finer than a step, in either order."""

    def build(
        num_steps: int, size: int, max_staleness: int, less: int, order: ConsumptionOrder
    ) -> SchedulerConfig:
        lead = (max_staleness + 1) * size - less % size
        return SchedulerConfig(
            num_steps=num_steps,
            groups_per_step=size,
            max_staleness=max_staleness,
            max_lead_groups=lead if less and max_staleness else None,
            order=order if max_staleness else "data",
        )

    return st.builds(
        build,
        st.integers(1, 6),
        st.integers(1, 4),
        st.integers(0, 4),
        st.integers(0, 3),
        st.sampled_from(("data", "completion")),
    )


@settings(max_examples=600, deadline=None)
@given(
    config=schedules(),
    actions=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 60)), max_size=120),
)
def test_any_schedule_trains_each_group_once_and_within_the_bound(
    config: SchedulerConfig, actions: list[tuple[int, int]]
) -> None:
    """Random latencies, losses, publishes, deaths: once, never too stale; in order if asked."""
    world = World(Scheduler(config))
    for action, choice in actions:
        world.act(action, choice)
        assert len(set(world.consumed)) == len(world.consumed)
        if config.order == "data":
            assert world.consumed == list(range(len(world.consumed)))
    world.finish()
    assert sorted(world.consumed) == list(range(config.num_groups))
    assert all(0 <= staleness <= config.max_staleness for staleness in world.staleness)


def test_completion_order_overtakes_until_a_group_would_be_too_stale() -> None:
    """Staleness 1, 2 groups a step, group 0 slow: step 0 goes on without it, step 1 waits for it.

    Four groups start under version 0, with deadline 1. Step 0 may leave (1 - 0) * 2 = 2 of them
    behind, step 1 none.
    """
    config = SchedulerConfig(num_steps=4, groups_per_step=2, max_staleness=1, order="completion")
    scheduler = Scheduler(config)
    tickets = scheduler.admit()
    assert [ticket.index for ticket in tickets] == [0, 1, 2, 3]
    scheduler.complete(tickets[3], version(0))
    scheduler.complete(tickets[1], version(0))
    batch = scheduler.take_batch()
    assert batch is not None
    assert [group.ticket.index for group in batch] == [1, 3]
    scheduler.trained(version(1))
    scheduler.published(version(1))
    for ticket in scheduler.admit():  # 4 and 5, under version 1
        scheduler.complete(ticket, version(1))
    scheduler.complete(tickets[2], version(0))
    assert scheduler.num_waiting == 3
    assert scheduler.take_batch() is None  # 4 and 5 must not overtake group 0 any more
    scheduler.complete(tickets[0], version(0))
    batch = scheduler.take_batch()
    assert batch is not None
    assert [(group.ticket.index, group.staleness) for group in batch] == [(0, 1), (2, 1)]


def test_resume_in_completion_order_skips_what_was_trained_ahead() -> None:
    """1 and 3 were trained on, 0 and 2 were not: after a resume 0, 2, 4 and 5 are sampled."""
    config = SchedulerConfig(num_steps=3, groups_per_step=2, max_staleness=1, order="completion")
    scheduler = Scheduler(config)
    tickets = scheduler.admit()
    for index in (1, 3):
        scheduler.complete(tickets[index], version(0))
    assert scheduler.take_batch() is not None
    scheduler.trained(version(1))
    state = json.loads(json.dumps(scheduler.state()))
    assert state["consumed_ahead"] == [1, 3]
    resumed = Scheduler.from_state(state, config)
    resumed.published(version(1))
    assert sample_all(resumed) == [0, 2, 4, 5]
    in_order = SchedulerConfig(num_steps=3, groups_per_step=2, max_staleness=1)
    with pytest.raises(ValueError, match=r"trained on 2 groups ahead .* keep order 'completion'"):
        Scheduler.from_state(state, in_order)
    with pytest.raises(ValueError, match="do not go together"):
        Scheduler.from_state({**state, "consumed_ahead": [0, 3]}, config)


def test_a_lead_in_groups_is_finer_than_a_step() -> None:
    """Staleness 1 with 3 instead of 4 groups: 3 start, and each publish lets 2 more in."""
    config = SchedulerConfig(num_steps=9, groups_per_step=2, max_staleness=1, max_lead_groups=3)
    scheduler = Scheduler(config)
    assert sample_all(scheduler) == [0, 1, 2]
    assert scheduler.take_batch() is not None
    scheduler.trained(version(1))
    assert scheduler.stall_reason == (
        "the samplers run version 0, the trainer has version 1, and max_lead_groups is 3: the "
        "batch cannot be completed until version 1 or later is published"
    )
    scheduler.published(version(1))
    assert sample_all(scheduler) == [3, 4]
    batch = scheduler.take_batch()
    assert batch is not None
    assert [group.staleness for group in batch] == [1, 0]
    assert config.max_publish_interval == 1
    assert (
        SchedulerConfig(num_steps=9, groups_per_step=2, max_staleness=2).max_publish_interval == 3
    )


def test_settings_without_effect_are_refused() -> None:
    """A lead that is another staleness, and an order where there is nothing to overtake."""
    with pytest.raises(
        ValueError, match=r"lets groups become 2 steps stale, .* max_staleness to 2"
    ):
        SchedulerConfig(num_steps=1, groups_per_step=2, max_staleness=1, max_lead_groups=5)
    with pytest.raises(ValueError, match=r"no step could ever have its 2 groups"):
        SchedulerConfig(num_steps=1, groups_per_step=2, max_lead_groups=1)
    with pytest.raises(ValueError, match="no effect with max_staleness = 0"):
        SchedulerConfig(num_steps=1, groups_per_step=2, order="completion")


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3, 4])
def test_the_bound_is_reached(max_staleness: int) -> None:
    """Admission is not stricter than needed: with eager samplers the last step is k steps old."""
    world = World(Scheduler(SchedulerConfig(
        num_steps=6, groups_per_step=2, max_staleness=max_staleness
    )))  # fmt: skip
    while not world.scheduler.finished:
        sample_all(world.scheduler)
        world.take()
        world.train()
        world.scheduler.published(world.scheduler.trained_version)
    assert max(world.staleness) == max_staleness
    assert world.staleness == [min(step, max_staleness) for step in range(6) for _ in range(2)]


@settings(max_examples=100, deadline=None)
@given(
    max_staleness=st.integers(0, 4),
    num_actions=st.integers(0, 60),
    actions=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 60)), min_size=60, max_size=60),
)
def test_restore_at_any_point_leaves_the_same_order(
    max_staleness: int, num_actions: int, actions: list[tuple[int, int]]
) -> None:
    """State saved anywhere: the restored run consumes exactly what the saved one had left."""
    config = SchedulerConfig(num_steps=5, groups_per_step=3, max_staleness=max_staleness)
    world = World(Scheduler(config))
    for action, choice in actions[:num_actions]:
        world.act(action, choice)
    already = list(world.consumed)
    twin = World(Scheduler.from_state(json.loads(json.dumps(world.scheduler.state())), config))
    for going_on in (world, twin):
        going_on.finish()
    assert already + twin.consumed == world.consumed == list(range(15))
