"""Rollouts with dynamic sampling, and what they count."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from async_policy import (
    Activity,
    Batch,
    GroupLostError,
    Refill,
    RefillError,
    Rollouts,
    Scheduler,
    SchedulerConfig,
    Ticket,
)
from rl_contracts.rollout import PolicyVersion


@dataclass(frozen=True, kw_only=True)
class Group:
    """Which prompt, the version of its first token, and whether it teaches anything."""

    index: int
    oldest_version: PolicyVersion
    informative: bool


@dataclass
class Toy:
    """A sampler that takes some turns of the event loop for each group."""

    kept: list[bool]
    turns: list[int]
    lost: set[int] = field(default_factory=set)
    version: PolicyVersion = field(default=PolicyVersion(0))

    async def sample(self, ticket: Ticket) -> Group:
        oldest = self.version
        for _ in range(self.turns[ticket.index % len(self.turns)]):
            await asyncio.sleep(0)
        if ticket.index in self.lost and ticket.attempt == 0:
            message = "its worker died"
            raise GroupLostError(message)
        return Group(
            index=ticket.index,
            oldest_version=oldest,
            informative=self.kept[ticket.index % len(self.kept)],
        )

    async def publish(self, version: PolicyVersion) -> None:
        await asyncio.sleep(0)
        self.version = version

    def rollouts(self, scheduler: Scheduler) -> Rollouts[Group]:
        return Rollouts(
            scheduler,
            sample=self.sample,
            oldest_version=lambda group: group.oldest_version,
            publish=self.publish,
            keep=lambda group: group.informative,
        )


async def train(
    rollouts: Rollouts[Group], *, until: int | None = None, turns: int = 3
) -> list[Batch[Group]]:
    """The loop of an example; `until` stops it before this version's step, as a death would."""
    batches: list[Batch[Group]] = []
    async with rollouts:
        await rollouts.publish(rollouts.scheduler.trained_version)
        async for batch in rollouts.batches():
            if batch.version == until:
                break
            batches.append(batch)
            for _ in range(turns):
                await asyncio.sleep(0)
            version = PolicyVersion(batch.version + 1)
            rollouts.trained(version)
            await rollouts.publish(version)
    return batches


def steps(batches: list[Batch[Group]]) -> list[tuple[list[int], list[int]]]:
    return [
        ([group.index for group in batch.groups], [group.index for group in batch.set_aside])
        for batch in batches
    ]


def in_turn(kept: list[bool], *, num_steps: int, size: int) -> list[tuple[list[int], list[int]]]:
    """The same steps by looking at one group after the other."""
    found: list[tuple[list[int], list[int]]] = []
    index = 0
    for _ in range(num_steps):
        chosen: list[int] = []
        aside: list[int] = []
        while len(chosen) < size:
            (chosen if kept[index % len(kept)] else aside).append(index)
            index += 1
        found.append((chosen, aside))
    return found


@settings(max_examples=150, deadline=None)
@given(
    max_staleness=st.integers(0, 3),
    size=st.integers(1, 4),
    kept=st.lists(st.booleans(), min_size=1, max_size=12).filter(any),
    turns=st.lists(st.integers(0, 20), min_size=1, max_size=15),
    lost=st.sets(st.integers(0, 30), max_size=5),
    stop=st.integers(0, 6),
)
def test_any_latencies_and_any_share_of_signal_give_the_same_steps(
    *, max_staleness: int, size: int, kept: list[bool], turns: list[int], lost: set[int], stop: int
) -> None:
    """In data order: the steps of a loop that looks at one group at a time, through a resume."""
    config = SchedulerConfig(
        num_steps=6,
        groups_per_step=size,
        max_staleness=max_staleness,
        refill=Refill(max_rounds=None, incomplete="raise", num_prompts=24 * len(kept) + 24),
    )
    first = Toy(kept, turns, lost).rollouts(Scheduler(config))
    batches = asyncio.run(train(first, until=stop))
    state = first.scheduler.state()
    toy = Toy(kept, turns[::-1], lost, first.scheduler.trained_version)
    second = toy.rollouts(Scheduler.from_state(state, config))
    batches += asyncio.run(train(second))
    assert steps(batches) == in_turn(kept, num_steps=6, size=size)
    assert max(value for batch in batches for value in batch.staleness) <= max_staleness
    scheduler = second.scheduler
    assert scheduler.num_trained_groups == 6 * size
    assert scheduler.num_set_aside >= sum(len(batch.set_aside) for batch in batches)
    for batch in batches:
        assert batch.activity.staleness == Counter(batch.staleness)


def test_activity_by_hand() -> None:
    """One step off, two groups a step, group 1 teaches nothing and 2 is lost once.

    Batch 0: 0, 1 and 3 in turn 1, then 4 in the place of 1 and 2 again: five completions, one lost.
    Batch 1 takes 3 and 4, which were there already; 5 and 6 start under version 1.
    """
    config = SchedulerConfig(
        num_steps=2,
        groups_per_step=2,
        max_staleness=1,
        refill=Refill(max_rounds=2, incomplete="raise"),
    )
    toy = Toy([True, False, True, True, True], [0], {2})
    batches = asyncio.run(train(toy.rollouts(Scheduler(config))))
    assert steps(batches) == [([0, 2], [1]), ([3, 4], [])]
    first, second = (batch.activity for batch in batches)
    assert (first.num_sampled, first.num_set_aside, first.num_redone) == (5, 1, 1)
    assert (first.num_waiting, first.num_in_flight) == (2, 0)
    assert first.redone_fraction == pytest.approx(1 / 6)
    assert (second.num_sampled, second.num_redone, second.num_waiting) == (0, 0, 0)
    assert (first.staleness, second.staleness) == ({0: 2}, {1: 2})


def test_groups_in_flight_during_a_publish_are_counted_as_partial() -> None:
    """One step off with slow groups: those of step 1 are in flight while version 1 is published."""
    config = SchedulerConfig(
        num_steps=2,
        groups_per_step=1,
        max_staleness=1,
        refill=Refill(max_rounds=2, incomplete="raise"),
    )
    toy = Toy([True], [1, 40])
    batches = asyncio.run(train(toy.rollouts(Scheduler(config))))
    assert [batch.activity.num_partial for batch in batches] == [0, 1]
    assert batches[1].activity.partial_fraction == 1.0
    assert batches[0].activity.num_in_flight == 1


def test_shares_by_hand() -> None:
    """3 of 4 s waited, 2 of 8 completed groups partial, 2 of 10 samplings lost; 0 of nothing."""
    activity = Activity(num_sampled=8, num_redone=2, num_partial=2, waited_s=3.0, elapsed_s=4.0)
    shares = (activity.idle_fraction, activity.partial_fraction, activity.redone_fraction)
    assert shares == (0.75, 0.25, 0.2)
    empty = Activity()
    assert (empty.idle_fraction, empty.partial_fraction, empty.redone_fraction) == (0, 0, 0)


def test_a_policy_without_signal_ends_the_loop_with_the_counts() -> None:
    """The error reaches a loop that waits, and not a hang; sampling tasks have ended."""
    config = SchedulerConfig(
        num_steps=3,
        groups_per_step=2,
        max_staleness=1,
        refill=Refill(max_rounds=2, incomplete="yield"),
    )
    toy = Toy([False], [2])
    with pytest.raises(RefillError, match=r"2 rounds of 2 groups gave 0 of the 2 .* 4 of 4 cand"):
        asyncio.run(train(toy.rollouts(Scheduler(config))))


def test_the_end_of_the_data_ends_the_loop() -> None:
    """Five prompts, the last two without signal: one full step, one short one, then the end."""
    config = SchedulerConfig(
        num_steps=9,
        groups_per_step=2,
        max_staleness=1,
        refill=Refill(max_rounds=None, incomplete="yield", num_prompts=6),
    )
    rollouts = Toy([True, True, True, False, False, False], [1]).rollouts(Scheduler(config))
    batches = asyncio.run(train(rollouts))
    assert steps(batches) == [([0, 1], []), ([2], [3, 4, 5])]
    assert rollouts.scheduler.num_set_aside == 3
    at_a_border = Toy([True, True, False, False, False, False], [1]).rollouts(Scheduler(config))
    assert steps(asyncio.run(train(at_a_border))) == [([0, 1], [])]
    assert at_a_border.scheduler.num_set_aside == 4


def test_keep_and_refill_need_each_other() -> None:
    """Either alone would be accepted and ignored."""
    toy = Toy([True], [0])
    with pytest.raises(ValueError, match=r"keep has no effect without SchedulerConfig.refill"):
        toy.rollouts(Scheduler(SchedulerConfig(num_steps=1, groups_per_step=1)))
    config = SchedulerConfig(
        num_steps=1, groups_per_step=1, refill=Refill(max_rounds=2, incomplete="raise")
    )
    with pytest.raises(ValueError, match="refill has no effect without keep; give both"):
        Rollouts(
            Scheduler(config),
            sample=toy.sample,
            oldest_version=lambda group: group.oldest_version,
            publish=toy.publish,
        )
