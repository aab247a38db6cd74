"""A set of samplers: spread, replaced, and brought to one version; fake replicas, no vLLM."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_contracts.images import PromptImage
from rl_contracts.rollout import Completion, PolicyVersion, Sampler, SamplingParams
from rl_contracts.train import NamedTensor, WeightSink
from rollout_vllm import (
    InFlight,
    Publication,
    PublishedWeights,
    SamplerClosedError,
    SamplerDiedError,
    VllmConfig,
    WeightUpdateError,
    publish_weights,
)
from rollout_vllm.replica import ReplicaLostError, ReplicaSetConfig, replica_config
from rollout_vllm.replicas import ReplicaSet
from rollout_vllm.sleep import PARTS, MemoryChange, Part, SamplerAsleepError

PARAMS = SamplingParams(max_new_tokens=1)


class FakeReplica:
    """Answers with its own number once it is let; dies, refuses or breaks when told."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.images: tuple[PromptImage, ...] = ()
        self.version = PolicyVersion(0)
        self.dead = False
        self.hangs = False
        self.refuses = False
        self.breaks = False
        self.stays = False
        self.dies_in_load = False
        self.asleep = False
        self.closed = 0
        self.answer = asyncio.Event()
        self.answer.set()
        self.loads: list[tuple[PolicyVersion, InFlight]] = []

    def _check(self) -> None:
        if self.dead:
            raise SamplerDiedError("vLLM's engine process died")

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        params: SamplingParams,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        self._check()
        self.images = tuple(images)
        if not prompt_ids:
            raise ValueError("sample: expected a prompt of 1 to 15 tokens, got 0")
        assert params is PARAMS
        await self.answer.wait()
        self._check()
        assert not self.asleep
        drawn = Completion(
            token_ids=(self.number,),
            rollout_logprobs=(-1.0,),
            policy_versions=(self.version,),
            finish_reason="length",
        )
        return [drawn] * num_samples

    async def check_published(self, published: Publication) -> None:
        self._check()
        if self.refuses:
            raise ValueError(f"weights of version {published.version} do not fit the model")

    async def load_published(
        self, published: Publication, *, keep: bool, in_flight: InFlight
    ) -> None:
        self._check()
        assert keep
        assert isinstance(published, PublishedWeights)
        assert all(path.is_file() for path in published.paths())
        await asyncio.sleep(0)
        if self.dies_in_load:
            self.dead = True
        self._check()
        if self.breaks:
            self.dead = True
            raise WeightUpdateError("broke off")
        self.version = published.version
        self.loads.append((published.version, in_flight))

    async def sleep(self, *, keep_weights: bool) -> MemoryChange:
        self._check()
        assert keep_weights
        self.asleep = True
        return MemoryChange(used_before=30, used_after=10 + self.number)

    async def wake(self, parts: Sequence[Part]) -> MemoryChange:
        self._check()
        assert self.asleep
        assert tuple(parts) == PARTS
        self.asleep = False
        return MemoryChange(used_before=10, used_after=30)

    async def ping(self) -> PolicyVersion:
        self._check()
        if self.hangs:
            await asyncio.Event().wait()
        return self.version

    async def close(self) -> None:
        self.closed += 1
        self.dead = True
        self.answer.set()
        if self.stays:
            raise OSError("no such process")


class World:
    """Every replica that was ever started."""

    def __init__(self) -> None:
        self.started: list[FakeReplica] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.num_starting = 0
        self.deaths_in_load = 0
        self.failures = 0
        self.failure: Exception = ReplicaLostError("no memory")

    async def start(self, number: int) -> FakeReplica:
        self.num_starting += 1
        try:
            await self.may_start.wait()
        finally:
            self.num_starting -= 1
        if self.failures:
            self.failures -= 1
            raise self.failure
        replica = FakeReplica(number)
        if len(self.started) > 0 and self.deaths_in_load:
            self.deaths_in_load -= 1
            replica.dies_in_load = True
        self.started.append(replica)
        return replica

    def newest(self, number: int) -> FakeReplica:
        return next(replica for replica in reversed(self.started) if replica.number == number)


def run(
    test: Callable[[World, ReplicaSet, Path], Awaitable[None]],
    folder: Path,
    *,
    num_replicas: int = 2,
    health_interval_s: float = 60.0,
    max_failed_starts: int = 3,
) -> World:
    """Run it with a set of fakes; afterwards nothing of the set is left."""

    async def body() -> World:
        world = World()
        config = ReplicaSetConfig(
            num_replicas=num_replicas,
            health_interval_s=health_interval_s,
            health_timeout_s=0.05,
            max_failed_starts=max_failed_starts,
        )
        replicas = await ReplicaSet.start(
            world.start, config, policy_version=PolicyVersion(0), dtype="float32"
        )
        async with replicas:
            await test(world, replicas, folder)
        await replicas.close()
        assert replicas._folder is None or not replicas._folder.exists()
        assert all(replica.closed for replica in world.started)
        return world

    return asyncio.run(body())


def publish(folder: Path, version: int) -> PublishedWeights:
    """A version of a model with one weight."""
    return publish_weights(
        [("w", torch.ones(1))], version=PolicyVersion(version), folder=folder, dtype="float32"
    )


async def all_serve(replicas: ReplicaSet) -> None:
    """Wait for it, with a limit."""
    async with asyncio.timeout(10):
        await replicas.until_all_serve()


async def draw(replicas: ReplicaSet, prompt: Sequence[int], num_samples: int = 1) -> int:
    """Number of the replica that answered."""
    (first, *_) = await replicas.sample(prompt, num_samples=num_samples, params=PARAMS)
    return first.token_ids[0]


async def prompt_of(replicas: ReplicaSet, number: int) -> list[int]:
    """A prompt that this replica answers while nothing else runs."""
    for token in range(50):
        if await draw(replicas, [token]) == number:
            return [token]
    raise AssertionError(f"no prompt for replica {number}")


def test_a_set_is_a_sampler_and_a_sink(tmp_path: Path) -> None:
    """A loop needs no other word for several samplers than for one; both get the weights."""

    async def test(world: World, replicas: ReplicaSet, folder: Path) -> None:
        sampler: Sampler = replicas
        sink: WeightSink = replicas
        del folder
        await sink.load_weights([NamedTensor("w", torch.ones(1))], version=PolicyVersion(1))
        assert sampler.policy_version == 1
        assert [replica.loads for replica in world.started] == [[(1, "keep")]] * 2
        await replicas.load_weights(
            [("w", torch.ones(1))], version=PolicyVersion(2), in_flight="abort"
        )
        assert [replica.loads[-1] for replica in world.started] == [(2, "abort")] * 2
        # the files of the present version stay for whoever is started, older ones go
        assert replicas._folder is not None
        assert [path.name[:2] for path in replicas._folder.iterdir()] == ["v2"]
        assert {await draw(replicas, [i]) for i in range(20)} == {0, 1}
        with pytest.raises(ValueError, match="expected a prompt of 1 to 15 tokens"):
            await draw(replicas, [])

    run(test, tmp_path)


def test_a_dead_replica_is_replaced_before_it_serves_again(tmp_path: Path) -> None:
    """Its requests are drawn by another; the new one loads the present version first."""

    async def test(world: World, replicas: ReplicaSet, folder: Path) -> None:
        await replicas.load_published(publish(folder, 5))
        prompt = await prompt_of(replicas, 0)
        first = world.newest(0)
        first.answer.clear()
        drawing = asyncio.create_task(draw(replicas, prompt, num_samples=2))
        await asyncio.sleep(0.01)
        world.may_start.clear()
        first.dead = True
        first.answer.set()
        assert await drawing == 1
        assert replicas.num_serving == 1
        assert await draw(replicas, prompt) == 1
        world.may_start.set()
        await all_serve(replicas)
        assert world.newest(0).loads == [(5, "keep")]
        assert await draw(replicas, prompt) == 0
        assert replicas.losses == ["replica 0: SamplerDiedError: vLLM's engine process died"]

    world = run(test, tmp_path)
    assert len(world.started) == 3


def test_a_replica_that_does_not_answer_is_dead(tmp_path: Path) -> None:
    """Nobody need ask it for tokens to find out, and its requests go elsewhere."""

    async def test(world: World, replicas: ReplicaSet, folder: Path) -> None:
        del folder
        prompt = await prompt_of(replicas, 0)
        world.newest(0).answer.clear()
        drawing = asyncio.create_task(draw(replicas, prompt))
        await asyncio.sleep(0.001)
        world.may_start.clear()
        world.newest(0).hangs = True
        assert await drawing == 1
        world.may_start.set()
        await all_serve(replicas)
        assert world.started[0].closed == 1

    run(test, tmp_path, health_interval_s=0.01)


def test_one_refusal_leaves_all_untouched(tmp_path: Path) -> None:
    """All or none: the replica that would have taken the weights does not."""

    async def test(world: World, replicas: ReplicaSet, folder: Path) -> None:
        world.newest(1).refuses = True
        published = publish(folder, 3)
        with pytest.raises(ValueError, match="version 3 do not fit the model"):
            await replicas.load_published(published)
        assert [replica.version for replica in world.started] == [0, 0]
        assert replicas.policy_version == 0
        assert replicas.num_serving == 2
        assert published.folder.exists()

    run(test, tmp_path)


def test_a_replica_that_breaks_is_replaced_by_one_with_the_new_weights(tmp_path: Path) -> None:
    """The version changes on all that serve, though one broke off in the middle."""

    async def test(world: World, replicas: ReplicaSet, folder: Path) -> None:
        world.newest(1).breaks = True
        await replicas.load_published(publish(folder, 3))
        assert replicas.policy_version == 3
        await all_serve(replicas)
        assert [world.newest(number).version for number in (0, 1)] == [3, 3]

    run(test, tmp_path)


def test_if_all_break_the_old_version_comes_back(tmp_path: Path) -> None:
    """Nobody has the new weights, so nobody is brought to them."""

    async def test(world: World, replicas: ReplicaSet, folder: Path) -> None:
        await replicas.load_published(publish(folder, 1))
        for number in (0, 1):
            world.newest(number).breaks = True
        with pytest.raises(WeightUpdateError, match=r"none of the 2 replicas .* load version 2"):
            await replicas.load_published(publish(folder, 2))
        await all_serve(replicas)
        assert replicas.policy_version == 1
        assert [world.newest(number).version for number in (0, 1)] == [1, 1]

    run(test, tmp_path)


@pytest.mark.parametrize("deaths_in_load", [0, 1, 2])
def test_if_all_die_the_next_one_loads_the_weights(tmp_path: Path, deaths_in_load: int) -> None:
    """An update waits for a replica, up to three times; then the version before comes back."""

    async def test(world: World, replicas: ReplicaSet, folder: Path) -> None:
        world.deaths_in_load = deaths_in_load
        world.may_start.clear()
        world.newest(0).dead = True
        loading = asyncio.create_task(replicas.load_published(publish(folder, 4)))
        await asyncio.sleep(0.01)
        assert replicas.num_serving == 0
        assert not loading.done()
        world.may_start.set()
        if deaths_in_load < 2:
            await loading
        else:
            with pytest.raises(
                WeightUpdateError,
                match=r"none of the 1 replicas could load version 4; last: replica 0: "
                r"SamplerDiedError: vLLM's engine process died",
            ):
                await loading
        await all_serve(replicas)
        assert (
            replicas.policy_version == world.newest(0).version == (4 if deaths_in_load < 2 else 0)
        )

    world = run(test, tmp_path, num_replicas=1, max_failed_starts=3)
    assert len(world.started) == 2 + deaths_in_load


def test_requests_wait_while_versions_change(tmp_path: Path) -> None:
    """A request that comes in the middle is drawn from the new weights."""

    async def test(world: World, replicas: ReplicaSet, folder: Path) -> None:
        del world
        loading = asyncio.create_task(replicas.load_published(publish(folder, 1)))
        await asyncio.sleep(0)
        assert not loading.done()
        (completion,) = await replicas.sample([1], num_samples=1, params=PARAMS)
        assert completion.policy_versions == (1,)
        await loading

    run(test, tmp_path)


def test_a_set_whose_replicas_do_not_start_gives_up(tmp_path: Path) -> None:
    """Waiting requests end with the reason; the start that works after failures is enough."""

    async def test(world: World, replicas: ReplicaSet, folder: Path) -> None:
        del folder
        world.failures = 1
        world.newest(0).dead = True
        assert await draw(replicas, [1]) == 0  # the second start worked
        world.failures = 2
        world.newest(0).dead = True
        with pytest.raises(
            SamplerClosedError, match=r"replica 0 did not start 2 times in a row .*: no memory"
        ):
            await draw(replicas, [1])

    run(test, tmp_path, num_replicas=1, max_failed_starts=2)


def test_errors_of_other_kinds_stop_nothing(tmp_path: Path) -> None:
    """A start, a question and an end may raise anything; the replica is replaced all the same."""

    async def test(world: World, replicas: ReplicaSet, folder: Path) -> None:
        await replicas.load_published(publish(folder, 1))
        world.failures, world.failure = 1, OSError("no place on the node")
        first = world.newest(0)
        first.hangs = first.stays = True
        async with asyncio.timeout(10):
            while world.newest(0) is first:  # noqa: ASYNC110  (nobody tells of it)
                await asyncio.sleep(0.01)
        await all_serve(replicas)
        (loss,) = replicas.losses
        assert loss.startswith("replica 0: TimeoutError: no answer to ping within 0.05 s")
        world.newest(0).stays = world.newest(1).stays = True  # and the set's files go

    run(test, tmp_path, health_interval_s=0.01)


def test_a_first_start_that_fails_closes_the_others() -> None:
    """The caller gets the reason, and no replica stays behind."""

    async def body() -> None:
        world = World()

        async def start(number: int) -> FakeReplica:
            if number == 1:
                raise ReplicaLostError("replica 1: no memory")
            return await world.start(number)

        with pytest.raises(ReplicaLostError, match="no memory"):
            await ReplicaSet.start(
                start,
                ReplicaSetConfig(num_replicas=2),
                policy_version=PolicyVersion(0),
                dtype="float32",
            )
        assert [replica.closed for replica in world.started] == [1]

    asyncio.run(body())


def test_while_the_devices_are_away_nothing_starts(tmp_path: Path) -> None:
    """Requests wait, and so does a replica that is to take the place of a dead one."""

    async def test(world: World, replicas: ReplicaSet, folder: Path) -> None:
        changes = await replicas.sleep()
        assert [(change.used_before, change.used_after) for change in changes] == [
            (30, 10),
            (30, 11),
        ]
        drawing = asyncio.create_task(draw(replicas, [1]))
        world.newest(0).dead = True
        async with asyncio.timeout(10):
            while replicas.num_serving == 2:  # noqa: ASYNC110  (nobody tells of it)
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert len(world.started) == 2
        assert not drawing.done()
        for refused in (replicas.sleep(), replicas.load_published(publish(folder, 1))):
            with pytest.raises(SamplerAsleepError, match=r"the replicas sleep; call wake first"):
                await refused
        assert len(await replicas.wake()) == 1
        assert await drawing in (0, 1)
        await all_serve(replicas)
        with pytest.raises(ValueError, match="the replicas are awake; call sleep first"):
            await replicas.wake()
        await replicas.load_published(publish(folder, 2))

    world = run(test, tmp_path, health_interval_s=0.01)
    assert len(world.started) == 3


def test_a_replica_that_is_being_started_does_not_take_lent_devices(tmp_path: Path) -> None:
    """Its start is cut off and repeated after `wake`; what died before has ended by then."""

    async def test(world: World, replicas: ReplicaSet, folder: Path) -> None:
        del folder
        prompt = await prompt_of(replicas, 0)
        world.may_start.clear()
        lost = world.newest(0)
        lost.dead = True
        assert await draw(replicas, prompt) == 1  # and another replica 0 is being started
        await asyncio.sleep(0.01)
        assert world.num_starting == 1
        await replicas.sleep()
        assert lost.closed == 1
        assert world.num_starting == 0
        world.may_start.set()
        await asyncio.sleep(0.01)
        assert (replicas.num_serving, len(world.started)) == (1, 2)
        await replicas.wake()
        await all_serve(replicas)
        assert not world.newest(0).asleep
        assert len(replicas.losses) == 1

    run(test, tmp_path, max_failed_starts=1)


def test_closing_ends_waiting_requests(tmp_path: Path) -> None:
    """Nobody waits for a replica that will not come."""

    async def test(world: World, replicas: ReplicaSet, folder: Path) -> None:
        del folder
        world.may_start.clear()
        world.newest(0).dead = True
        waiting = asyncio.create_task(draw(replicas, [1]))
        await asyncio.sleep(0.01)
        await replicas.close()
        with pytest.raises(SamplerClosedError, match="the replica set was closed"):
            await waiting

    run(test, tmp_path, num_replicas=1)


def test_seeds_of_replicas() -> None:
    """A44: four seeds from one, the same after a restart, others for another one."""

    def seeds(seed: int) -> list[int]:
        config = VllmConfig(model="m", max_model_len=16, kv_cache_gib=1.0, seed=seed)
        seeds = [replica_config(config, number).seed for number in range(4)]
        assert config.seed == seed
        return seeds

    assert len({*seeds(42), *seeds(43)}) == 8
    assert seeds(42) == seeds(42)


def test_a_replica_is_shown_the_images() -> None:
    """The set hands them to the replica that draws."""

    async def run() -> None:
        world = World()
        replicas = await ReplicaSet.start(
            world.start,
            ReplicaSetConfig(num_replicas=1),
            policy_version=PolicyVersion(0),
            dtype="float32",
        )
        rgb = np.zeros((1, 1, 3), dtype=np.uint8)
        shown = [PromptImage(rgb=rgb, first_token=0, num_tokens=1)]
        await replicas.sample([10], num_samples=1, params=PARAMS, images=shown)
        await replicas.close()
        assert world.started[0].images == tuple(shown)

    asyncio.run(run())
