"""The asyncio driver: equal to the synchronous loop at 0, bounded at k, errors without hangs."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from async_policy import (
    Batch,
    GroupLostError,
    Rollouts,
    SamplingError,
    Scheduler,
    SchedulerConfig,
    StalledError,
    Ticket,
    Timeouts,
    WaitTimeoutError,
)
from rl_contracts.rollout import PolicyVersion


@dataclass(frozen=True, kw_only=True)
class Group:
    """What the toy sampler returns: which prompt, and the version of its first token."""

    index: int
    oldest_version: PolicyVersion


@dataclass
class Toy:
    """One sampler and one trainer that write down what they do."""

    turns: Callable[[int], int] = lambda _index: 0
    trace: list[str] = field(default_factory=list)
    sampler_version: PolicyVersion = field(default=PolicyVersion(0))

    async def sample(self, ticket: Ticket) -> Group:
        """Take some turns of the event loop; no clock, so the order is always the same."""
        self.trace.append(f"sample {ticket.index} with {self.sampler_version}")
        oldest = self.sampler_version
        for _ in range(self.turns(ticket.index)):
            await asyncio.sleep(0)
        return Group(index=ticket.index, oldest_version=oldest)

    async def train(self, groups: list[int], version: int) -> PolicyVersion:
        self.trace.append(f"train {groups} at {version}")
        for _ in range(3):
            await asyncio.sleep(0)
        self.trace.append(f"trained {version + 1}")
        return PolicyVersion(version + 1)

    async def publish(self, version: PolicyVersion) -> None:
        await asyncio.sleep(0)
        self.sampler_version = version
        self.trace.append(f"publish {version}")


def oldest_version(group: Group) -> PolicyVersion:
    return group.oldest_version


def rollouts_of(
    toy: Toy,
    config: SchedulerConfig,
    *,
    sample: Callable[[Ticket], Awaitable[Group]] | None = None,
    publish: Callable[[PolicyVersion], Awaitable[None]] | None = None,
    timeouts: Timeouts | None = None,
) -> Rollouts[Group]:
    return Rollouts(
        Scheduler(config),
        sample=sample or toy.sample,
        oldest_version=oldest_version,
        publish=publish or toy.publish,
        timeouts=timeouts,
    )


async def run_loop(toy: Toy, rollouts: Rollouts[Group]) -> list[Batch[Group]]:
    """The loop of an example."""
    batches = []
    async with rollouts:
        async for batch in rollouts.batches():
            batches.append(batch)
            version = await toy.train([group.index for group in batch.groups], batch.version)
            rollouts.trained(version)
            await rollouts.publish(version)
    return batches


async def never() -> Group:
    await asyncio.Event().wait()
    raise AssertionError


def test_staleness_zero_is_the_synchronous_loop() -> None:
    """The trace of samples, steps and publishes equals that of a loop written by hand."""
    by_hand = Toy()

    async def synchronous_loop() -> None:
        for step in range(4):
            groups = [
                await by_hand.sample(
                    Ticket(
                        index=index,
                        step=PolicyVersion(step),
                        admitted_version=PolicyVersion(step),
                        attempt=0,
                    )
                )
                for index in range(3 * step, 3 * step + 3)
            ]
            version = await by_hand.train([group.index for group in groups], step)
            await by_hand.publish(version)

    asyncio.run(synchronous_loop())
    toy = Toy(turns=lambda index: 5 * index % 7)
    batches = asyncio.run(
        run_loop(toy, rollouts_of(toy, SchedulerConfig(num_steps=4, groups_per_step=3)))
    )
    assert toy.trace == by_hand.trace
    assert toy.trace[:5] == [
        "sample 0 with 0",
        "sample 1 with 0",
        "sample 2 with 0",
        "train [0, 1, 2] at 0",
        "trained 1",
    ]
    assert [batch.staleness for batch in batches] == [(0, 0, 0)] * 4


def test_staleness_zero_samples_nothing_between_publish_and_the_next_batch() -> None:
    """What the loop does after a publish, such as validation, has the samplers for itself."""
    toy = Toy()

    async def loop() -> None:
        rollouts = rollouts_of(toy, SchedulerConfig(num_steps=2, groups_per_step=1))
        async with rollouts:
            async for batch in rollouts.batches():
                rollouts.trained(PolicyVersion(batch.version + 1))
                await rollouts.publish(PolicyVersion(batch.version + 1))
                for _ in range(5):
                    await asyncio.sleep(0)
                toy.trace.append("validated")

    asyncio.run(loop())
    assert toy.trace == [
        "sample 0 with 0",
        "publish 1",
        "validated",
        "sample 1 with 1",
        "publish 2",
        "validated",
    ]


def test_staleness_one_samples_the_next_batch_while_training() -> None:
    """One step off: step 1 is sampled with version 0 before step 0 is trained."""
    toy = Toy()
    config = SchedulerConfig(num_steps=3, groups_per_step=2, max_staleness=1)
    batches = asyncio.run(run_loop(toy, rollouts_of(toy, config)))
    assert toy.trace == [
        "sample 0 with 0",
        "sample 1 with 0",
        "sample 2 with 0",
        "sample 3 with 0",
        "train [0, 1] at 0",
        "trained 1",
        "publish 1",
        "sample 4 with 1",
        "sample 5 with 1",
        "train [2, 3] at 1",
        "trained 2",
        "publish 2",
        "train [4, 5] at 2",
        "trained 3",
        "publish 3",
    ]
    assert [batch.staleness for batch in batches] == [(0, 0), (1, 1), (1, 1)]


@settings(max_examples=60, deadline=None)
@given(
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 4),
    turns=st.lists(st.integers(0, 25), min_size=20, max_size=20),
    lost=st.sets(st.integers(0, 19), max_size=5),
    background=st.booleans(),
)
def test_random_latencies_keep_bound_and_order(
    max_staleness: int, groups_per_step: int, turns: list[int], lost: set[int], *, background: bool
) -> None:
    """Any latencies, lost groups, publishing beside training: in order, once, within the bound."""
    toy = Toy(turns=lambda index: turns[index])
    config = SchedulerConfig(
        num_steps=20 // groups_per_step,
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
    )

    async def sample(ticket: Ticket) -> Group:
        group = await toy.sample(ticket)
        if ticket.index in lost and ticket.attempt == 0:
            message = "its worker died"
            raise GroupLostError(message)
        return group

    async def loop() -> list[Batch[Group]]:
        rollouts = rollouts_of(toy, config, sample=sample)
        batches = []
        publishing: asyncio.Task[None] | None = None
        async with rollouts:
            async for batch in rollouts.batches():
                batches.append(batch)
                version = await toy.train([group.index for group in batch.groups], batch.version)
                rollouts.trained(version)
                if publishing is not None:
                    await publishing
                publishing = asyncio.create_task(rollouts.publish(version))
                if not background:
                    await publishing
            if publishing is not None:
                await publishing
        return batches

    batches = asyncio.run(loop())
    consumed = [group.index for batch in batches for group in batch.groups]
    assert consumed == list(range(config.num_groups))
    for batch in batches:
        expected = tuple(batch.version - group.oldest_version for group in batch.groups)
        assert batch.staleness == expected
        assert max(expected) <= max_staleness


def test_sampling_error_reaches_a_waiting_loop() -> None:
    """One group fails while others never end: the loop gets the error, with its cause."""
    toy = Toy()

    async def sample(ticket: Ticket) -> Group:
        if ticket.index == 1:
            message = "no such token 99"
            raise KeyError(message)
        return await never()

    rollouts = rollouts_of(toy, SchedulerConfig(num_steps=1, groups_per_step=2), sample=sample)
    with pytest.raises(
        SamplingError, match=r"sampling group 1 \(step 0\) failed: KeyError"
    ) as info:
        asyncio.run(run_loop(toy, rollouts))
    assert isinstance(info.value.__cause__, KeyError)
    assert rollouts.scheduler.num_in_flight == 0


def test_sampling_error_reaches_a_loop_that_is_publishing() -> None:
    """A sampler that died also lets a publish hang: the loop gets the sampling error."""
    toy = Toy()
    publishing = asyncio.Event()

    async def sample(ticket: Ticket) -> Group:
        if ticket.index == 0:
            return Group(index=0, oldest_version=PolicyVersion(0))
        await publishing.wait()
        message = "the sampler died"
        raise ConnectionError(message)

    async def publish(_version: PolicyVersion) -> None:
        publishing.set()
        await never()

    config = SchedulerConfig(num_steps=2, groups_per_step=1, max_staleness=1)
    with pytest.raises(SamplingError, match=r"group 1 .*the sampler died"):
        asyncio.run(run_loop(toy, rollouts_of(toy, config, sample=sample, publish=publish)))


def test_older_weights_than_published_are_an_error() -> None:
    """A publish that changes nothing in the sampler is found at the next group."""
    toy = Toy()

    async def publish(_version: PolicyVersion) -> None:
        """Forget to load anything."""

    config = SchedulerConfig(num_steps=2, groups_per_step=1)
    with pytest.raises(SamplingError, match="still answers with older weights"):
        asyncio.run(run_loop(toy, rollouts_of(toy, config, publish=publish)))


def test_group_that_is_lost_each_time_is_given_up() -> None:
    """After three attempts the loss is an error, not an endless repetition."""
    attempts: list[int] = []

    async def sample(ticket: Ticket) -> Group:
        attempts.append(ticket.attempt)
        message = "worker 3 died"
        raise GroupLostError(message)

    toy = Toy()
    config = SchedulerConfig(num_steps=1, groups_per_step=1)
    with pytest.raises(SamplingError, match=r"group 0 \(step 0, attempt 2\) .*worker 3 died"):
        asyncio.run(run_loop(toy, rollouts_of(toy, config, sample=sample)))
    assert attempts == [0, 1, 2]


def test_late_batch_names_the_missing_groups() -> None:
    """A batch that does not come ends in an error that says who waited for which groups."""

    async def sample(ticket: Ticket) -> Group:
        if ticket.index == 0:
            return Group(index=0, oldest_version=PolicyVersion(0))
        return await never()

    toy = Toy()
    rollouts = rollouts_of(
        toy,
        SchedulerConfig(num_steps=2, groups_per_step=3, max_staleness=1),
        sample=sample,
        timeouts=Timeouts(batch_s=0.05),
    )
    with pytest.raises(
        WaitTimeoutError,
        match=r"the trainer waited 0\.05 s for the batch of version 0 \(limit: batch_s\): 1 of "
        r"3 groups are there, and 2 are still being sampled: group 1 \(step 0\), for 0\.\d s; "
        r"group 2 \(step 0\)",
    ):
        asyncio.run(run_loop(toy, rollouts))


def test_late_publish_names_the_version() -> None:
    """Samplers that never take the weights are an error that names the version."""

    async def publish(_version: PolicyVersion) -> None:
        await never()

    toy = Toy()
    rollouts = rollouts_of(
        toy,
        SchedulerConfig(num_steps=2, groups_per_step=1),
        publish=publish,
        timeouts=Timeouts(publish_s=0.05),
    )
    with pytest.raises(
        WaitTimeoutError,
        match=r"the trainer waited 0\.05 s for the samplers to take the weights of version 1",
    ):
        asyncio.run(run_loop(toy, rollouts))
    assert rollouts.scheduler.published_version == 0


def test_publishes_that_overlap_are_sent_one_after_the_other() -> None:
    """Version 1 takes long, version 2 does not: the samplers end with 2, and so does the count."""
    toy = Toy()
    slow = asyncio.Event()

    async def publish(version: PolicyVersion) -> None:
        if version == 1:
            await slow.wait()
        await toy.publish(version)

    async def loop() -> None:
        config = SchedulerConfig(num_steps=3, groups_per_step=1, max_staleness=2)
        async with rollouts_of(toy, config, publish=publish) as rollouts:
            publishes: list[asyncio.Task[None]] = []
            async for batch in rollouts.batches():
                if batch.version == 2:
                    break
                trained = PolicyVersion(batch.version + 1)
                rollouts.trained(trained)
                publishes.append(asyncio.create_task(rollouts.publish(trained)))
                await asyncio.sleep(0.01)
            slow.set()
            await asyncio.gather(*publishes)
            assert toy.sampler_version == rollouts.scheduler.published_version == 2

    asyncio.run(loop())


def test_loop_that_forgets_to_publish_is_told_so() -> None:
    """Without a publish the next batch can never come: an error at once, not a wait."""
    toy = Toy()

    async def loop() -> None:
        rollouts = rollouts_of(toy, SchedulerConfig(num_steps=2, groups_per_step=1))
        async with rollouts:
            async for batch in rollouts.batches():
                rollouts.trained(PolicyVersion(batch.version + 1))

    with pytest.raises(StalledError, match=r"no batch for version 1: the samplers run version 0"):
        asyncio.run(loop())


def test_loop_that_forgets_trained_is_told_so() -> None:
    """Without `trained` the batch would be trained on again after a resume: an error at once."""
    toy = Toy()

    async def loop() -> None:
        rollouts = rollouts_of(toy, SchedulerConfig(num_steps=2, groups_per_step=1))
        async with rollouts:
            async for _ in rollouts.batches():
                pass

    with pytest.raises(ValueError, match=r"still in training; call trained\(1\)"):
        asyncio.run(loop())


def test_publish_ahead_of_the_trainer_sends_nothing() -> None:
    """The version is checked before any weight moves."""
    toy = Toy()

    async def loop() -> None:
        async with rollouts_of(toy, SchedulerConfig(num_steps=2, groups_per_step=1)) as rollouts:
            await rollouts.publish(PolicyVersion(1))

    with pytest.raises(ValueError, match="publish 1: expected version 0;"):
        asyncio.run(loop())
    assert toy.trace == []


def test_leaving_the_loop_ends_every_sampling_task() -> None:
    """An error in the loop, or a cancellation: sampling tasks are cancelled and awaited."""
    ended: list[int] = []

    async def sample(ticket: Ticket) -> Group:
        if ticket.index == 0:
            return Group(index=0, oldest_version=PolicyVersion(0))
        try:
            return await never()
        finally:
            await asyncio.sleep(0)
            ended.append(ticket.index)

    toy = Toy()

    async def loop() -> None:
        config = SchedulerConfig(num_steps=9, groups_per_step=1, max_staleness=2)
        async with rollouts_of(toy, config, sample=sample) as rollouts:
            async for _ in rollouts.batches():
                message = "the trainer failed"
                raise RuntimeError(message)

    async def cancelled_loop() -> None:
        task = asyncio.create_task(loop_that_waits())
        for _ in range(10):
            await asyncio.sleep(0)
        task.cancel()
        await task

    async def loop_that_waits() -> None:
        config = SchedulerConfig(num_steps=9, groups_per_step=2, max_staleness=1)
        async with rollouts_of(toy, config, sample=sample) as rollouts:
            async for _ in rollouts.batches():
                pass

    with pytest.raises(RuntimeError, match="the trainer failed"):
        asyncio.run(loop())
    assert sorted(ended) == [1, 2]
    ended.clear()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled_loop())
    assert sorted(ended) == [1, 2, 3]


def test_sampling_task_that_will_not_end_is_named() -> None:
    """A sampler that swallows its cancellation is an error on closing, not a hang."""
    release = asyncio.Event()

    async def sample(_ticket: Ticket) -> Group:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return Group(index=0, oldest_version=PolicyVersion(0))

    toy = Toy()

    async def loop() -> None:
        rollouts = rollouts_of(
            toy,
            SchedulerConfig(num_steps=1, groups_per_step=1),
            sample=sample,
            timeouts=Timeouts(batch_s=0.05, close_s=0.05),
        )
        try:
            async with rollouts:
                async for _ in rollouts.batches():
                    pass
        finally:
            release.set()

    with pytest.raises(
        WaitTimeoutError,
        match=r"close waited 0\.05 s for sample group 0 \(step 0\) to end after cancellation",
    ):
        asyncio.run(loop())


def test_use_outside_of_the_with_statement_is_refused() -> None:
    """Nothing would end the sampling tasks, so nothing starts."""
    toy = Toy()
    rollouts = rollouts_of(toy, SchedulerConfig(num_steps=1, groups_per_step=1))

    async def loop() -> None:
        async for _ in rollouts.batches():
            pass

    with pytest.raises(ValueError, match="Rollouts are closed; use them inside `async with"):
        asyncio.run(loop())
    with pytest.raises(ValueError, match="expected max_attempts of at least 1, got 0"):
        Rollouts(
            Scheduler(SchedulerConfig(num_steps=1, groups_per_step=1)),
            sample=toy.sample,
            oldest_version=oldest_version,
            publish=toy.publish,
            max_attempts=0,
        )


def test_resumed_run_goes_on_where_the_state_was_written() -> None:
    """Stop after three of six steps, restore: the batches that are left, none twice."""
    toy = Toy()
    config = SchedulerConfig(num_steps=6, groups_per_step=2, max_staleness=2)
    first = rollouts_of(toy, config)

    async def until_three() -> None:
        async with first:
            async for batch in first.batches():
                if batch.version == 3:
                    return
                rollouts_trained = PolicyVersion(batch.version + 1)
                first.trained(rollouts_trained)
                await first.publish(rollouts_trained)

    asyncio.run(until_three())
    fresh = Toy()
    second = Rollouts(
        Scheduler.from_state(first.scheduler.state(), config),
        sample=fresh.sample,
        oldest_version=oldest_version,
        publish=fresh.publish,
    )

    async def the_rest() -> list[Batch[Group]]:
        async with second:
            await second.publish(second.scheduler.trained_version)
        return await run_loop(fresh, second)

    batches = asyncio.run(the_rest())
    assert [group.index for batch in batches for group in batch.groups] == list(range(6, 12))
    assert [batch.version for batch in batches] == [3, 4, 5]
