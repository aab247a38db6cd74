"""A set of samplers that a trainer streams weights to; fake samplers, real streams."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl_contracts.images import PromptImage
from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm import (
    InFlight,
    Publication,
    SamplerClosedError,
    SamplerDiedError,
    WeightUpdateError,
    publish_weights,
)
from rollout_vllm.offered import OfferedWeights
from rollout_vllm.replica import ReplicaLostError, ReplicaSetConfig
from rollout_vllm.replicas import ReplicaSet
from rollout_vllm.sleep import PARTS, MemoryChange, Part, SamplerAsleepError
from rollout_vllm.stream_receiver import StreamReceiver
from rollout_vllm.torch_headers import tensor_headers
from rollout_vllm.weights_stream import WeightStream

CPU = torch.device("cpu")
PARAMS = SamplingParams(max_new_tokens=1)
ROWS = 64  # of 4 KiB: with halves of 64 KiB the weights come in four buckets


def weights_of(version: int) -> dict[str, Tensor]:
    """A version's number, everywhere."""
    return {"w": torch.full((ROWS, 1024), float(version))}


class World:
    """Every replica that was ever started, and what happened in which order."""

    def __init__(self) -> None:
        self.started: list[StreamedReplica] = []
        self.events: list[str] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.next_dies: str | None = None

    async def start(self, number: int) -> "StreamedReplica":
        await self.may_start.wait()
        replica = StreamedReplica(number, self.events)
        replica.dies, self.next_dies = self.next_dies, None
        self.started.append(replica)
        return replica

    def newest(self, number: int) -> "StreamedReplica":
        return next(replica for replica in reversed(self.started) if replica.number == number)

    def values(self) -> list[float]:
        """Of the replicas that live: all of a replica's weights are the same number."""
        found = []
        for replica in self.started:
            if not replica.dead:
                (value,) = replica.weights.unique().tolist()
                found.append(value)
        return found


class StreamedReplica:
    """Takes weights as an engine does, from the model's folder (0) on; dies when told."""

    def __init__(self, number: int, events: list[str]) -> None:
        self.number = number
        self.events = events
        self.weights = weights_of(0)["w"]
        self.version = PolicyVersion(0)
        self.dead = False
        self.dies: str | None = None
        self.refuses = False
        self.asleep: set[Part] = set()
        self.answer = asyncio.Event()
        self.answer.set()
        self.num_loads = 0

    def check(self) -> None:
        if self.dead:
            raise SamplerDiedError("vLLM's engine process died")

    def _die(self, when: str) -> None:
        self.dead = self.dead or self.dies == when
        self.check()

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        params: SamplingParams,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        del prompt_ids, params, images
        self.check()
        assert not self.asleep
        await self.answer.wait()
        self.check()
        drawn = Completion(
            token_ids=(self.number,),
            rollout_logprobs=(-1.0,),
            policy_versions=(self.version,),
            finish_reason="length",
        )
        return [drawn] * num_samples

    async def check_published(self, published: Publication) -> None:
        self._die("at the check")
        if self.refuses:
            raise ValueError(f"version {published.version} does not fit")
        assert "weights" not in self.asleep
        assert published.tensors()["w"].shape == (ROWS, 1024)

    async def load_published(
        self, published: Publication, *, keep: bool, in_flight: InFlight
    ) -> None:
        assert keep
        assert in_flight == "keep"
        self._die("before it comes")
        assert isinstance(published, OfferedWeights)
        await asyncio.to_thread(self._receive, published)
        self.version = published.version
        self.num_loads += 1

    def _receive(self, published: OfferedWeights) -> None:
        try:
            incoming = StreamReceiver(CPU).receive(published.instructions())
        except OSError as error:
            raise ConnectionError("nothing was loaded") from error
        try:
            with incoming as stream:
                for pieces in stream.buckets():
                    self._die("in the middle")
                    for piece in pieces:
                        self.weights[piece.start : piece.start + len(piece.rows)] = piece.rows
        except Exception as error:
            self.check()
            self.dead = True
            raise WeightUpdateError("broke off") from error

    async def sleep(self, *, keep_weights: bool) -> MemoryChange:
        self._die("falling asleep")
        assert keep_weights
        assert not self.asleep
        self.asleep = set(PARTS)
        self.events.append(f"{self.number} sleeps")
        return MemoryChange(used_before=30, used_after=10)

    async def wake(self, parts: Sequence[Part]) -> MemoryChange:
        self._die("waking")
        if not set(parts) <= self.asleep:
            raise ValueError(f"wake: {sorted(self.asleep)} sleep, got {parts}")
        self.asleep -= set(parts)
        self.events.append(f"{self.number} wakes {'+'.join(parts)}")
        return MemoryChange(used_before=10, used_after=30)

    async def ping(self) -> PolicyVersion:
        self.check()
        return self.version

    async def close(self) -> None:
        self.dead = True
        self.answer.set()


class FakeTrainer:
    """Has one version of the weights, on the devices or not, and sends it by a real stream."""

    def __init__(self, world: World, stream: WeightStream, *, shares_devices: bool) -> None:
        self.shares_devices = shares_devices
        self.version = PolicyVersion(0)
        self.is_there = True
        self.failure: Exception | None = None
        self.cannot_come = False
        self.may_send = asyncio.Event()
        self.may_send.set()
        self._world = world
        self._stream = stream

    async def take_devices(self) -> None:
        assert not self.is_there
        assert all(r.dead or r.asleep == set(PARTS) for r in self._world.started)
        self.is_there = True
        if self.cannot_come:
            self.cannot_come = False
            raise MemoryError("no memory for the second rank")
        self._world.events.append("trainer comes")

    async def leave_devices(self) -> None:
        assert self.is_there
        if isinstance(self.failure, MemoryError):
            raise self.failure
        self.is_there = False
        self._world.events.append("trainer leaves")

    @contextlib.asynccontextmanager
    async def offering(self) -> AsyncIterator[OfferedWeights]:
        assert self.is_there
        yield self._stream.offer(self.version)

    async def send(self, replicas: Sequence[int]) -> None:
        self._world.events.append(f"sends {int(self.version)} to {sorted(replicas)}")
        await self.may_send.wait()
        await asyncio.to_thread(self._send, len(replicas))

    def _send(self, num_receivers: int) -> None:
        self._stream.send(self._export(), num_receivers=num_receivers)

    def _export(self) -> Iterator[tuple[str, Tensor]]:
        if self.failure is not None:
            raise self.failure
        yield from weights_of(self.version).items()


Test = Callable[[World, ReplicaSet, FakeTrainer], Awaitable[None]]


def run(test: Test, *, shares_devices: bool = False, max_failed_starts: int = 3) -> World:
    """Run it with two fakes, in limited time."""

    async def body() -> World:
        world = World()
        config = ReplicaSetConfig(
            num_replicas=2,
            health_interval_s=0.01,
            health_timeout_s=5.0,
            max_failed_starts=max_failed_starts,
        )
        replicas = await ReplicaSet.start(
            world.start, config, policy_version=PolicyVersion(0), dtype="float32"
        )
        stream = WeightStream(
            tensor_headers(weights_of(0).items(), dtype="float32"),
            dtype="float32",
            device=CPU,
            bucket_bytes=2**17,
            timeout_s=60.0,
        )
        with stream:
            async with replicas, asyncio.timeout(20):  # below the stream's: nobody waits in vain
                await test(
                    world, replicas, FakeTrainer(world, stream, shares_devices=shares_devices)
                )
        return world

    return asyncio.run(body())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what nobody tells of."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_a_replica_that_is_back_is_sent_the_weights_again() -> None:
    """The other one is not: it has them. Files of before are gone."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        trainer.version = PolicyVersion(3)
        await replicas.load_from(trainer)
        assert world.values() == [3.0, 3.0]
        world.newest(0).dead = True
        await until(lambda: len(world.started) == 3)
        await replicas.until_all_serve()
        assert world.newest(0).version == replicas.policy_version == 3
        assert world.values() == [3.0, 3.0]
        assert world.newest(1).num_loads == 1

    assert run(test).events == ["sends 3 to [0, 1]", "sends 3 to [0]"]


def test_if_the_trainer_is_ahead_all_get_what_it_has() -> None:
    """Nobody has version 1 any more; two replicas with two versions would be worse."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        trainer.version = PolicyVersion(1)
        await replicas.load_from(trainer)
        trainer.version = PolicyVersion(2)  # trained, not published
        world.newest(0).dead = True
        await until(lambda: len(world.started) == 3)
        await replicas.until_all_serve()
        assert replicas.policy_version == 2
        assert world.values() == [2.0, 2.0]
        (drawn,) = await replicas.sample([1], num_samples=1, params=PARAMS)
        assert drawn.policy_versions == (2,)

    assert run(test).events == ["sends 1 to [0, 1]", "sends 2 to [0, 1]"]


@pytest.mark.parametrize("when", ["at the check", "before it comes"])
def test_one_that_dies_before_it_receives_harms_nobody(when: str) -> None:
    """The other one gets the weights at once, although the sender waited for two."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        trainer.version = PolicyVersion(1)
        world.newest(1).dies = when
        world.may_start.clear()
        await replicas.load_from(trainer)
        assert (replicas.policy_version, replicas.num_serving) == (1, 1)
        assert world.values() == [1.0]
        assert world.newest(0).num_loads == 1
        world.may_start.set()
        await replicas.until_all_serve()
        assert world.values() == [1.0, 1.0]

    sent = [event for event in run(test).events if event.startswith("sends")]
    first = [] if when == "at the check" else ["sends 1 to [0, 1]"]
    assert sent == [*first, "sends 1 to [0]", "sends 1 to [1]"]


def test_one_that_dies_in_the_middle_takes_the_other_with_it() -> None:
    """Neither answers with half of each; the two that come instead get the weights."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        world.newest(1).dies = "in the middle"
        trainer.version = PolicyVersion(1)
        await replicas.load_from(trainer)
        await replicas.until_all_serve()
        assert replicas.policy_version == 1
        assert world.values() == [1.0, 1.0]
        assert [replica.dead for replica in world.started] == [True, True, False, False]
        assert sorted(replicas.losses) == [
            "replica 0: WeightUpdateError: broke off",
            "replica 1: SamplerDiedError: vLLM's engine process died",
        ]

    run(test)


def test_a_trainer_that_fails_is_told_to_the_caller() -> None:
    """Replicas that had begun are replaced by ones with the version before, sent again."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        trainer.version = PolicyVersion(1)
        await replicas.load_from(trainer)
        trainer.failure = RuntimeError("a gather failed")
        with pytest.raises(RuntimeError, match="a gather failed"):
            await replicas.load_from(trainer)
        assert replicas.policy_version == 1
        trainer.failure = None
        await replicas.until_all_serve()
        assert world.values() == [1.0, 1.0]

    run(test)


def test_files_go_when_a_stream_comes(tmp_path: Path) -> None:
    """They belong to the set until the next weights are there."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        async def load(published: Publication, *, keep: bool, in_flight: InFlight) -> None:
            del keep, in_flight
            for replica in world.started:
                replica.version = published.version

        for replica in world.started:
            replica.load_published = load  # type: ignore[method-assign]
        published = publish_weights(
            weights_of(1).items(), version=PolicyVersion(1), folder=tmp_path, dtype="float32"
        )
        await replicas.load_published(published)
        assert published.folder.exists()
        for replica in world.started:
            del replica.load_published
        trainer.version = PolicyVersion(2)
        await replicas.load_from(trainer)
        assert not published.folder.exists()

    run(test)


def test_on_shared_devices_a_publish_is_a_hand_over() -> None:
    """From devices that are the trainer's to devices that are the replicas', with new weights."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        assert len(world.started) == 2
        await replicas.sleep()
        trainer.version = PolicyVersion(1)
        drawing = asyncio.create_task(replicas.sample([1], num_samples=1, params=PARAMS))
        await replicas.load_from(trainer)
        assert not trainer.is_there
        (drawn,) = await drawing
        assert drawn.policy_versions == (1,)
        with pytest.raises(ValueError, match="the replicas are awake"):
            await replicas.wake()
        await replicas.sleep()
        trainer.shares_devices = False
        with pytest.raises(SamplerAsleepError, match="load: the replicas sleep; call wake first"):
            await replicas.load_from(trainer)

    assert run(test, shares_devices=True).events == [
        *("0 sleeps", "1 sleeps", "0 wakes weights", "1 wakes weights", "sends 1 to [0, 1]"),
        *("trainer leaves", "0 wakes kv_cache", "1 wakes kv_cache", "0 sleeps", "1 sleeps"),
    ]


def test_on_shared_devices_the_trainer_comes_for_a_replica_that_is_back() -> None:
    """In the replicas' turn: a request that runs stands still meanwhile, and is not lost."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        await replicas.sleep()
        trainer.version = PolicyVersion(1)
        await replicas.load_from(trainer)
        world.events.clear()
        world.newest(1).answer.clear()
        world.newest(0).dead = True
        await until(lambda: replicas.num_serving == 1)
        drawing = asyncio.create_task(replicas.sample([1], num_samples=1, params=PARAMS))
        await replicas.until_all_serve()
        assert not drawing.done()
        assert not trainer.is_there
        assert world.values() == [1.0, 1.0]
        world.newest(1).answer.set()
        (drawn,) = await drawing
        assert drawn.token_ids == (1,)

    assert run(test, shares_devices=True).events == [
        *("1 sleeps", "0 sleeps", "trainer comes", "1 wakes weights", "0 wakes weights"),
        *("sends 1 to [0]", "trainer leaves", "1 wakes kv_cache", "0 wakes kv_cache"),
    ]


@pytest.mark.parametrize("when", ["falling asleep", "waking"])
def test_one_that_dies_before_it_joins_harms_nobody_on_shared_devices(when: str) -> None:
    """The other one is woken as it sleeps; no trainer comes onto a device that may be full."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        await replicas.sleep()
        trainer.version = PolicyVersion(1)
        await replicas.load_from(trainer)
        world.events.clear()
        world.next_dies = when
        world.newest(0).dead = True
        await until(lambda: len(world.started) == 4)
        await replicas.until_all_serve()
        assert not world.newest(1).asleep
        assert replicas.losses == ["replica 0: SamplerDiedError: vLLM's engine process died"]
        assert world.values() == [1.0, 1.0]

    tried = {
        "falling asleep": ["1 sleeps", "1 wakes weights+kv_cache"],
        "waking": [
            *("1 sleeps", "0 sleeps", "trainer comes", "1 wakes weights", "trainer leaves"),
            "1 wakes kv_cache",
        ],
    }
    assert run(test, shares_devices=True).events == [
        *tried[when],
        *("1 sleeps", "0 sleeps", "trainer comes", "1 wakes weights", "0 wakes weights"),
        *("sends 1 to [0]", "trainer leaves", "1 wakes kv_cache", "0 wakes kv_cache"),
    ]


def test_a_trainer_that_comes_in_part_leaves_again() -> None:
    """Before the replicas wake: one of its ranks may have come."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        await replicas.sleep()
        await replicas.load_from(trainer)
        world.events.clear()
        trainer.cannot_come = True
        with pytest.raises(MemoryError, match="no memory for the second rank"):
            await replicas.load_from(trainer)
        assert not trainer.is_there
        assert replicas.num_serving == 2

    assert run(test, shares_devices=True).events == [
        *("0 sleeps", "1 sleeps", "trainer leaves"),
        *("0 wakes weights+kv_cache", "1 wakes weights+kv_cache"),
    ]


def test_new_requests_wait_for_every_update_that_is_under_way() -> None:
    """For the one that waits for another to end, too: no completion meets two versions."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        trainer.version = PolicyVersion(1)
        await replicas.load_from(trainer)
        trainer.may_send.clear()
        world.newest(0).dead = True
        await until(lambda: world.events[-1] == "sends 1 to [0]")
        trainer.version = PolicyVersion(2)
        loading = asyncio.create_task(replicas.load_from(trainer))
        await until(lambda: bool(replicas._updates.updating))
        drawing = asyncio.create_task(replicas.sample([1], num_samples=1, params=PARAMS))
        trainer.may_send.set()
        trainer.may_send = asyncio.Event()
        await until(lambda: world.events[-1] == "sends 2 to [0, 1]")
        trainer.may_send.set()
        await loading
        (drawn,) = await drawing
        assert drawn.policy_versions == (2,)

    run(test)


def test_weights_that_do_not_fit_are_never_sent() -> None:
    """Nobody waits for the sender, nor it for anybody; the next ones are taken."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        trainer.version = PolicyVersion(1)
        for replica in world.started:
            replica.refuses = True
        with pytest.raises(ValueError, match="version 1 does not fit"):
            await replicas.load_from(trainer)
        assert world.events == []
        for replica in world.started:
            replica.refuses = False
        await replicas.load_from(trainer)
        assert world.values() == [1.0, 1.0]
        assert replicas.losses == []

    assert run(test).events == ["sends 1 to [0, 1]"]


def test_if_all_die_asleep_the_next_ones_get_the_weights() -> None:
    """Nobody is there to take them: the trainer leaves, and comes again for those that start."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        await replicas.sleep()
        for replica in list(world.started):
            replica.dead = True
        await until(lambda: replicas.num_serving == 0)
        trainer.version = PolicyVersion(1)
        await replicas.load_from(trainer)
        await replicas.until_all_serve()
        assert world.values() == [1.0, 1.0]
        assert not trainer.is_there

    run(test, shares_devices=True)


def test_a_trainer_that_does_not_leave_ends_the_set() -> None:
    """Requests would wait for ever."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        del world
        await replicas.sleep()
        trainer.failure = MemoryError("no memory on the host")
        drawing = asyncio.create_task(replicas.sample([1], num_samples=1, params=PARAMS))
        with pytest.raises(MemoryError, match="no memory on the host"):
            await replicas.load_from(trainer)
        with pytest.raises(SamplerClosedError, match="source did not leave the devices"):
            await drawing

    run(test, shares_devices=True)


def test_a_replica_that_cannot_take_the_weights_does_not_serve() -> None:
    """Its starts count; then the set gives up with the reason."""

    async def test(world: World, replicas: ReplicaSet, trainer: FakeTrainer) -> None:
        trainer.version = PolicyVersion(1)
        await replicas.load_from(trainer)
        trainer.failure = ReplicaLostError("it is the sender that fails")
        world.newest(0).dead = True
        await until(lambda: len(world.started) > 2)
        with pytest.raises(SamplerClosedError, match="replica 0 did not start 2 times in a row"):
            await replicas.until_all_serve()
        with pytest.raises(SamplerClosedError, match="did not start 2 times"):
            await replicas.sample([1], num_samples=1, params=PARAMS)

    run(test, max_failed_starts=2)
