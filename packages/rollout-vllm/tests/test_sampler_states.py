"""What the sampler does when its engine fails in the middle; a fake engine, no vLLM."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from rl_contracts.images import PromptImage
from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm import (
    Device,
    InFlight,
    PublishedWeights,
    RequestOptions,
    SamplerAsleepError,
    SamplerClosedError,
    TokenDelta,
    VllmConfig,
    VllmSampler,
    WeightUpdateError,
    publish_weights,
)
from rollout_vllm.headers import TensorHeader
from rollout_vllm.sleep import Part

PARAMS = SamplingParams(max_new_tokens=4)


class FakeEngine:
    """Requests wait until they are aborted; updates wait for `finish_update`, or fail."""

    max_model_len = 16
    vocab_size = 8
    tied = False

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.unreachable = False
        self.aborted = asyncio.Event()
        self.updating = asyncio.Event()
        self.finish_update = asyncio.Event()
        self.updates: list[PolicyVersion] = []
        self.options: list[RequestOptions] = []
        self.shut_down = 0
        self.calls: list[str] = []
        self.memory = 100

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        params: SamplingParams,
        options: RequestOptions,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        """Wait for `abort`, then return what there is: nothing."""
        assert request_id
        assert prompt_ids
        assert params is PARAMS
        assert not images
        self.options.append(options)
        await self.aborted.wait()
        empty = Completion(
            token_ids=(), rollout_logprobs=(), policy_versions=(), finish_reason="abort"
        )
        return [empty] * num_samples

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Let all requests return."""
        assert request_ids is not None
        self.aborted.set()

    async def stream(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        params: SamplingParams,
        options: RequestOptions,
        images: Sequence[PromptImage] = (),
    ) -> AsyncGenerator[TokenDelta, None]:
        """Not asked for here."""
        raise NotImplementedError(f"{request_id} {prompt_ids} {params} {options} {images}")
        yield

    async def hold(self, in_flight: InFlight) -> None:
        """Write it down; requests never end by themselves here."""
        self.calls.append(f"hold {in_flight}")
        if in_flight == "wait":
            await asyncio.Event().wait()

    async def update_weights(
        self, instructions: Mapping[str, object], *, version: PolicyVersion
    ) -> None:
        """Wait for `finish_update`."""
        paths = instructions["paths"]
        assert isinstance(paths, list)
        assert await asyncio.to_thread(lambda: all(Path(path).is_file() for path in paths))
        self.updating.set()
        if self.unreachable:
            raise ConnectionError("nothing was loaded, the engine did not reach the sender")
        if self.fails:
            raise WeightUpdateError("broke off in the engine: out of memory")
        await self.finish_update.wait()
        self.updates.append(version)
        self.calls.append(f"load {version}")

    async def go_on(self) -> None:
        """Write it down."""
        self.calls.append("go on")

    async def sleep(self, *, keep_weights: bool) -> None:
        """Write it down."""
        self.calls.append(f"sleep {keep_weights}")
        if self.fails:
            raise WeightUpdateError("falling asleep broke off in the engine: no pinned memory")
        self.memory -= 80

    async def wake(self, parts: Sequence[Part]) -> None:
        """Write it down."""
        self.calls.append(f"wake {' '.join(parts)}")
        self.memory += 40 * len(parts)

    async def used_memory(self) -> int:
        """Bytes."""
        return self.memory

    async def settings(self) -> Mapping[str, Mapping[str, object]]:
        """Nothing to report."""
        return {}

    async def environment(self) -> Mapping[str, str]:
        """Nothing to report."""
        return {}

    def shutdown(self) -> None:
        """Count it."""
        self.shut_down += 1


def make(
    engine: FakeEngine, *, timeout_s: float = 60.0, device: Device = "cpu", sleeps: bool = False
) -> VllmSampler:
    """A sampler of a model with one weight."""
    return VllmSampler(
        engine,
        config=VllmConfig(
            model="m",
            device=device,
            enable_sleep=sleeps,
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


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
def test_an_update_holds_loads_and_goes_on(tmp_path: Path, in_flight: InFlight) -> None:
    """Requests stand still while weights change, in the mode that was asked for."""

    async def run() -> None:
        engine = FakeEngine()
        engine.finish_update.set()
        await make(engine).load_published(publish(tmp_path), in_flight=in_flight)
        assert engine.calls == [f"hold {in_flight}", "load 1", "go on"]

    asyncio.run(run())


def test_waiting_for_requests_ends_without_harm(tmp_path: Path) -> None:
    """Requests that run too long to be waited for go on, with the old weights."""

    async def run() -> None:
        engine = FakeEngine()
        engine.finish_update.set()
        sampler = make(engine, timeout_s=0.05)
        published = publish(tmp_path)
        with pytest.raises(TimeoutError, match=r"requests still run after 0.05 s \(VllmConfig.wei"):
            await sampler.load_published(published, in_flight="wait")
        assert engine.calls == ["hold wait", "go on"]
        assert sampler.policy_version == 0
        await sampler.load_published(published)
        assert sampler.policy_version == 1

    asyncio.run(run())


def test_a_sender_that_is_not_reached_does_no_harm(tmp_path: Path) -> None:
    """Requests go on with the old weights, and the next update is as good as ever."""

    async def run() -> None:
        engine = FakeEngine()
        engine.finish_update.set()
        engine.unreachable = True
        sampler = make(engine)
        with pytest.raises(ConnectionError, match="nothing was loaded"):
            await sampler.load_published(publish(tmp_path))
        assert engine.calls == ["hold keep", "go on"]
        engine.unreachable = False
        await sampler.load_published(publish(tmp_path))
        assert sampler.policy_version == 1

    asyncio.run(run())


def test_only_who_would_load_refuses_what_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other samplers may take what does not fit this one: its sender hears nothing of a check."""
    refused: list[str] = []
    monkeypatch.setattr(PublishedWeights, "refuse", lambda _, reason: refused.append(reason))

    async def run() -> None:
        sampler = make(FakeEngine())
        published = publish_weights(
            [("other", torch.ones(1))], version=PolicyVersion(1), folder=tmp_path, dtype="float32"
        )
        with pytest.raises(ValueError, match="'w' is missing"):
            await sampler.check_published(published)
        assert refused == []
        with pytest.raises(ValueError, match="'w' is missing") as error:
            await sampler.load_published(published)
        assert refused == [str(error.value)]

    asyncio.run(run())


def test_sleep_gives_memory_and_wakes_by_parts(tmp_path: Path) -> None:
    """Memory before and after; asleep, nothing is sampled, and weights need their memory."""

    async def run() -> None:
        engine = FakeEngine()
        engine.finish_update.set()
        sampler = make(engine, device="cuda", sleeps=True)
        change = await sampler.sleep(keep_weights=True)
        assert (change.used_before, change.used_after) == (100, 20)
        with pytest.raises(SamplerAsleepError, match=r"kv_cache, weights of the sampler sleep; wa"):
            await sampler.sample([1], num_samples=1, params=PARAMS)
        with pytest.raises(
            SamplerAsleepError, match=r"the weights sleep; wake \(\"weights\",\) fi"
        ):
            await sampler.load_published(publish(tmp_path))
        with pytest.raises(SamplerAsleepError, match="sleeps already"):
            await sampler.sleep(keep_weights=True)
        change = await sampler.wake(("weights",))
        assert (change.used_before, change.used_after) == (20, 60)
        # the caches sleep, and so do the requests: an update leaves them alone
        await sampler.load_published(publish(tmp_path))
        with pytest.raises(ValueError, match=r"some of the parts that sleep, \['kv_cache'\], got"):
            await sampler.wake(("weights",))
        await sampler.wake(("kv_cache",))
        assert engine.calls == [
            "hold keep",
            "sleep True",
            "wake weights",
            "load 1",
            "wake kv_cache",
        ]

    asyncio.run(run())


def test_a_sampler_that_stops_half_way_to_sleep_is_closed() -> None:
    """Its requests are held, and nobody would let them go: no later one waits for ever."""

    async def run() -> None:
        engine = FakeEngine()
        engine.fails = True
        sampler = make(engine, device="cuda", sleeps=True)
        with pytest.raises(WeightUpdateError, match="broke off in the engine: no pinned memory"):
            await sampler.sleep(keep_weights=True)
        with pytest.raises(SamplerClosedError, match="broke off in the engine: no pinned memory"):
            await sampler.sample([1], num_samples=1, params=PARAMS)

    asyncio.run(run())


def test_weights_given_up_must_be_loaded_before_all_is_awake(tmp_path: Path) -> None:
    """No token is drawn from memory that holds nothing."""

    async def run() -> None:
        engine = FakeEngine()
        engine.finish_update.set()
        sampler = make(engine, device="cuda", sleeps=True)
        await sampler.sleep(keep_weights=False, in_flight="abort")
        with pytest.raises(SamplerAsleepError, match=r"given up by sleep\(keep_weights=False\)"):
            await sampler.wake()
        await sampler.wake(("weights",))
        with pytest.raises(SamplerAsleepError, match=r"given up by sleep\(keep_weights=False\)"):
            await sampler.wake(("kv_cache",))
        await sampler.load_published(publish(tmp_path))
        await sampler.wake(("kv_cache",))
        assert engine.calls[:2] == ["hold abort", "sleep False"]

    asyncio.run(run())


def test_sleep_on_the_cpu_is_refused_by_name() -> None:
    """vLLM's sleep does nothing there, without a word."""
    with pytest.raises(
        ValueError, match=r"enable_sleep = True cannot run on the CPU .* do nothing"
    ):
        make(FakeEngine(), sleeps=True)
    with pytest.raises(ValueError, match=r"enable_sleep is False: on the CPU vLLM's sleep does no"):
        asyncio.run(make(FakeEngine()).sleep(keep_weights=True))


def test_deadline_aborts_and_returns_what_there_is() -> None:
    """The samples come back with the reason abort, the sampler goes on, and nothing runs on."""

    async def run() -> None:
        engine = FakeEngine()
        sampler = make(engine)
        options = RequestOptions(deadline_s=0.01)
        completions = await sampler.sample([1], num_samples=2, params=PARAMS, options=options)
        assert [completion.finish_reason for completion in completions] == ["abort", "abort"]
        assert engine.options == [options]
        assert sampler.num_running == 0

    asyncio.run(run())


def test_cancelling_before_the_deadline_ends_the_request() -> None:
    """The engine's call is cancelled with the caller's, deadline or not."""

    async def run() -> None:
        sampler = make(FakeEngine())
        options = RequestOptions(deadline_s=60.0)
        task = asyncio.create_task(
            sampler.sample([1], num_samples=1, params=PARAMS, options=options)
        )
        await asyncio.sleep(0.01)
        assert sampler.num_running == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sampler.num_running == 0
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_stream_takes_no_deadline() -> None:
    """A loop has its own ways to stop; the option would do nothing there."""

    async def run() -> None:
        options = RequestOptions(deadline_s=1.0)
        with pytest.raises(ValueError, match=r"deadline_s = 1.0 is for sample; break the loop"):
            async for _ in make(FakeEngine()).stream([1], params=PARAMS, options=options):
                pass

    asyncio.run(run())
