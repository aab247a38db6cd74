"""What the sampler does when its engine fails in the middle; a fake engine, no vLLM."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm import (
    PublishedWeights,
    SamplerClosedError,
    VllmConfig,
    VllmSampler,
    WeightUpdateError,
    publish_weights,
)
from rollout_vllm.headers import TensorHeader

PARAMS = SamplingParams(max_new_tokens=4)


class FakeEngine:
    """Requests wait until they are aborted; updates wait for `finish_update`, or fail."""

    max_model_len = 16
    vocab_size = 8
    tied = False

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.aborted = asyncio.Event()
        self.updating = asyncio.Event()
        self.finish_update = asyncio.Event()
        self.updates: list[PolicyVersion] = []
        self.shut_down = 0

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        params: SamplingParams,
    ) -> list[Completion]:
        """Wait for `abort`, then return what there is: nothing."""
        assert request_id
        assert prompt_ids
        assert params is PARAMS
        await self.aborted.wait()
        empty = Completion(
            token_ids=(), rollout_logprobs=(), policy_versions=(), finish_reason="abort"
        )
        return [empty] * num_samples

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Let all requests return."""
        assert request_ids is not None
        self.aborted.set()

    async def update_weights(
        self, paths: Sequence[Path], *, version: PolicyVersion, tied: bool
    ) -> None:
        """Wait for `finish_update`."""
        assert all(path.is_file() for path in paths)
        assert not tied
        self.updating.set()
        if self.fails:
            raise WeightUpdateError("broke off in the engine: out of memory")
        await self.finish_update.wait()
        self.updates.append(version)

    async def settings(self) -> Mapping[str, Mapping[str, object]]:
        """Nothing to report."""
        return {}

    async def environment(self) -> Mapping[str, str]:
        """Nothing to report."""
        return {}

    def shutdown(self) -> None:
        """Count it."""
        self.shut_down += 1


def make(engine: FakeEngine, *, timeout_s: float = 60.0) -> VllmSampler:
    """A sampler of a model with one weight."""
    return VllmSampler(
        engine,
        config=VllmConfig(
            model="m",
            max_model_len=16,
            kv_cache_gib=1.0,
            dtype="float32",
            weight_update_timeout_s=timeout_s,
        ),
        policy_version=PolicyVersion(0),
        tensors={"w": TensorHeader("F32", (1,))},
    )


def publish(folder: Path) -> PublishedWeights:
    """Version 1 of the one weight."""
    return publish_weights(
        [("w", torch.ones(1))], version=PolicyVersion(1), folder=folder, dtype="float32"
    )


def test_broken_update_closes_the_sampler(tmp_path: Path) -> None:
    """After half an update nothing answers: running, waiting and later calls get the reason."""

    async def run() -> None:
        engine = FakeEngine(fails=True)
        sampler = make(engine)
        running = asyncio.create_task(sampler.sample([1], num_samples=2, params=PARAMS))
        await asyncio.sleep(0)
        with pytest.raises(WeightUpdateError, match="out of memory"):
            await sampler.load_published(publish(tmp_path))
        with pytest.raises(WeightUpdateError, match="out of memory"):
            await running
        with pytest.raises(WeightUpdateError, match="out of memory"):
            await sampler.sample([1], num_samples=2, params=PARAMS)
        assert sampler.policy_version == 0
        assert engine.shut_down == 1
        await sampler.close()
        assert engine.shut_down == 1

    asyncio.run(run())


def test_update_that_hangs_is_named(tmp_path: Path) -> None:
    """The message says who waited for what, and which setting holds the limit."""

    async def run() -> None:
        sampler = make(FakeEngine(), timeout_s=0.05)
        with pytest.raises(
            WeightUpdateError, match=r"did not take version 1 within 0.05 s \(VllmConfig.weight_up"
        ):
            await sampler.load_published(publish(tmp_path))

    asyncio.run(run())


def test_cancelled_load_finishes_first(tmp_path: Path) -> None:
    """Cancelling a load in the middle leaves the new version, never half of it."""

    async def run() -> None:
        engine = FakeEngine()
        sampler = make(engine)
        load = asyncio.create_task(sampler.load_published(publish(tmp_path)))
        await engine.updating.wait()
        load.cancel()
        await asyncio.sleep(0)
        assert not load.done()
        engine.finish_update.set()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert sampler.policy_version == 1

    asyncio.run(run())


def test_two_loads_run_one_after_the_other(tmp_path: Path) -> None:
    """A second update waits for the first."""

    async def run() -> None:
        engine = FakeEngine()
        sampler = make(engine)
        loads = [asyncio.create_task(sampler.load_published(publish(tmp_path))) for _ in range(2)]
        await engine.updating.wait()
        assert engine.updates == []
        engine.finish_update.set()
        await asyncio.gather(*loads)
        assert engine.updates == [1, 1]

    asyncio.run(run())


def test_close_ends_running_requests() -> None:
    """A request that runs while the sampler closes ends with an error, not half a completion."""

    async def run() -> None:
        engine = FakeEngine()
        async with make(engine) as sampler:
            running = asyncio.create_task(sampler.sample([1], num_samples=1, params=PARAMS))
            await asyncio.sleep(0)
            assert sampler.num_running == 1
        with pytest.raises(SamplerClosedError, match="the sampler was closed"):
            await running
        assert engine.shut_down == 1

    asyncio.run(run())
