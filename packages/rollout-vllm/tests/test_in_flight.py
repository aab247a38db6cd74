"""Requests that survive an update: prefix, logprobs and versions of every part; a fake engine."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

import numpy as np

from rl_contracts.images import PromptImage
from rl_contracts.rollout import Completion, FinishReason, PolicyVersion, SamplingParams
from rollout_vllm import InFlight, RequestOptions, TokenDelta
from rollout_vllm.engine import Engine
from rollout_vllm.in_flight import ResumingEngine, continued_params
from rollout_vllm.sleep import Part

PARAMS = SamplingParams(max_new_tokens=5, seed=7)
OPTIONS = RequestOptions(min_new_tokens=3)


class Asked:
    """What the engine was asked to draw."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams, minimum: int) -> None:
        self.prompt = list(prompt)
        self.params = params
        self.minimum = minimum


class CountingEngine:
    """Draws the numbers that follow the prompt's last; stands still unless it is let go.

    A sample ends by itself after `max_new_tokens`, and with `abort` when it is held in that mode.
    """

    max_model_len = 100
    vocab_size = 100
    tied = False

    def __init__(self) -> None:
        self.version = PolicyVersion(0)
        self.asked: dict[str, Asked] = {}
        self.images: list[tuple[PromptImage, ...]] = []
        self.steps = asyncio.Semaphore(0)
        self.running: dict[str, asyncio.Event] = {}
        self.shut_down = False
        self.may_hold = asyncio.Event()
        self.may_hold.set()

    async def _deltas(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, minimum: int
    ) -> AsyncGenerator[TokenDelta, None]:
        self.asked[request_id] = Asked(prompt, params, minimum)
        aborted = self.running[request_id] = asyncio.Event()
        token = prompt[-1]
        try:
            for place in range(params.max_new_tokens):
                step = asyncio.ensure_future(self.steps.acquire())
                end = asyncio.ensure_future(aborted.wait())
                await asyncio.wait([step, end], return_when=asyncio.FIRST_COMPLETED)
                stepped = step.done()
                step.cancel()
                end.cancel()
                if not stepped:
                    yield self._delta((), "abort")
                    return
                token += 1
                last = place + 1 == params.max_new_tokens
                yield self._delta((token,), "length" if last else None)
        finally:
            del self.running[request_id]

    def _delta(self, token_ids: tuple[int, ...], reason: FinishReason | None) -> TokenDelta:
        return TokenDelta(
            token_ids=token_ids,
            rollout_logprobs=tuple(-token / 10 - self.version for token in token_ids),
            policy_versions=(self.version,) * len(token_ids),
            finish_reason=reason,
        )

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
        self.images.append(tuple(images))
        drawn = Completion(
            token_ids=(), rollout_logprobs=(), policy_versions=(), finish_reason="abort"
        )
        async for delta in self._deltas(request_id, prompt_ids, params, options.min_new_tokens):
            drawn = Completion(
                token_ids=drawn.token_ids + delta.token_ids,
                rollout_logprobs=drawn.rollout_logprobs + delta.rollout_logprobs,
                policy_versions=drawn.policy_versions + delta.policy_versions,
                finish_reason=delta.finish_reason or "abort",
            )
        return [drawn] * num_samples

    def stream(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        params: SamplingParams,
        options: RequestOptions,
        images: Sequence[PromptImage] = (),
    ) -> AsyncGenerator[TokenDelta, None]:
        self.images.append(tuple(images))
        return self._deltas(request_id, prompt_ids, params, options.min_new_tokens)

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self.running:  # others have ended
                self.running[request_id].set()

    async def hold(self, in_flight: InFlight) -> None:
        await self.may_hold.wait()
        if in_flight == "abort":
            await self.abort(list(self.running))

    async def update_weights(
        self, instructions: Mapping[str, object], *, version: PolicyVersion
    ) -> None:
        assert not instructions
        self.version = version

    async def go_on(self) -> None:
        pass

    async def sleep(self, *, keep_weights: bool) -> None:
        assert keep_weights

    async def wake(self, parts: Sequence[Part]) -> None:
        assert parts

    async def used_memory(self) -> int:
        return 0

    async def settings(self) -> Mapping[str, Mapping[str, object]]:
        return {}

    async def environment(self) -> Mapping[str, str]:
        return {}

    def shutdown(self) -> None:
        self.shut_down = True


async def settle() -> None:
    """Let everything that can run do so."""
    for _ in range(50):
        await asyncio.sleep(0)


async def steps(engine: CountingEngine, number: int) -> None:
    """Let samples draw so many tokens together."""
    for _ in range(number):
        engine.steps.release()
        await settle()


def draw(
    engine: Engine, params: SamplingParams = PARAMS, num_samples: int = 1
) -> "asyncio.Task[list[Completion]]":
    """Ask for completions of the prompt 10."""
    return asyncio.create_task(
        engine.generate("a", [10], num_samples=num_samples, params=params, options=OPTIONS)
    )


async def update(engine: Engine, version: int, in_flight: InFlight) -> None:
    """New weights."""
    await engine.hold(in_flight)
    await settle()
    await engine.update_weights({}, version=PolicyVersion(version))
    await engine.go_on()
    await settle()


def test_a_request_that_comes_while_others_are_ended_goes_on_too() -> None:
    """It reaches the engine before that holds, and is ended with them."""

    async def run() -> None:
        inner = CountingEngine()
        engine = ResumingEngine(inner)
        inner.may_hold.clear()
        updating = asyncio.create_task(update(engine, 1, "abort"))
        await settle()
        drawing = draw(engine)
        await settle()
        assert inner.running
        inner.may_hold.set()
        await updating
        await steps(inner, 5)
        (completion,) = await drawing
        assert completion.finish_reason == "length"
        assert completion.policy_versions == (1,) * 5

    asyncio.run(run())


def test_an_aborted_request_goes_on_from_its_prefix() -> None:
    """Twice interrupted: 2 tokens of version 0, 1 of version 4, 2 of version 5, logprobs kept."""

    async def run() -> None:
        inner = CountingEngine()
        engine = ResumingEngine(inner)
        drawing = draw(engine)
        await settle()
        await steps(inner, 2)
        await update(engine, 4, "abort")
        await steps(inner, 1)
        await update(engine, 5, "abort")
        await steps(inner, 2)
        (completion,) = await drawing
        assert completion.token_ids == (11, 12, 13, 14, 15)
        assert completion.policy_versions == (0, 0, 4, 5, 5)
        assert completion.rollout_logprobs == (-1.1, -1.2, -1.3 - 4, -1.4 - 5, -1.5 - 5)
        assert completion.finish_reason == "length"
        assert [asked.prompt for asked in inner.asked.values()] == [
            [10],
            [10, 11, 12],
            [10, 11, 12, 13],
        ]
        assert [asked.params.max_new_tokens for asked in inner.asked.values()] == [5, 3, 2]
        assert [asked.minimum for asked in inner.asked.values()] == [3, 1, 0]
        assert len({asked.params.seed for asked in inner.asked.values()}) == 3

    asyncio.run(run())


def test_a_kept_request_is_left_alone() -> None:
    """One request to the engine, whose later tokens say that they are of the new version."""

    async def run() -> None:
        inner = CountingEngine()
        engine = ResumingEngine(inner)
        drawing = draw(engine)
        await settle()
        await steps(inner, 2)
        await update(engine, 4, "keep")
        await steps(inner, 3)
        (completion,) = await drawing
        assert completion.policy_versions == (0, 0, 4, 4, 4)
        assert list(inner.asked) == ["a"]

    asyncio.run(run())


def test_nothing_is_asked_before_the_new_weights_are_there() -> None:
    """Between abort and the end of the update the request waits; its prefix is not drawn again."""

    async def run() -> None:
        inner = CountingEngine()
        engine = ResumingEngine(inner)
        drawing = draw(engine)
        await settle()
        await steps(inner, 1)
        await engine.hold("abort")
        await settle()
        assert list(inner.asked) == ["a"]
        assert not inner.running
        await engine.update_weights({}, version=PolicyVersion(1))
        await engine.go_on()
        await steps(inner, 4)
        assert (await drawing)[0].policy_versions == (0, 1, 1, 1, 1)

    asyncio.run(run())


def test_the_callers_own_abort_is_no_reason_to_go_on() -> None:
    """Aborted while it runs, or while it waits for an update: it returns what it has."""

    async def run() -> None:
        for during_update in (False, True):
            inner = CountingEngine()
            engine = ResumingEngine(inner)
            drawing = draw(engine)
            await settle()
            await steps(inner, 2)
            if during_update:
                await engine.hold("abort")
                await settle()
            await engine.abort(["a", "unknown"])
            (completion,) = await asyncio.wait_for(drawing, 5)
            assert completion.token_ids == (11, 12)
            assert completion.finish_reason == "abort"
            assert list(inner.asked) == ["a"]

    asyncio.run(run())


def test_greedy_samples_go_on_as_one() -> None:
    """They are all the same, so only one is drawn."""

    async def run() -> None:
        inner = CountingEngine()
        engine = ResumingEngine(inner)
        drawing = draw(engine, SamplingParams(max_new_tokens=5, temperature=0.0), num_samples=3)
        await settle()
        await steps(inner, 2)
        await update(engine, 1, "abort")
        await steps(inner, 3)
        completions = await drawing
        assert [completion.token_ids for completion in completions] == [(11, 12, 13, 14, 15)] * 3
        assert len(inner.asked) == 2

    asyncio.run(run())


def test_a_stream_goes_on_as_if_nothing_had_happened() -> None:
    """Its deltas join to one completion; the interruption is no last delta."""

    async def run() -> None:
        inner = CountingEngine()
        engine = ResumingEngine(inner)
        deltas: list[TokenDelta] = []

        async def read() -> None:
            stream = engine.stream("s", [10], params=PARAMS, options=OPTIONS)
            async for delta in stream:
                deltas.append(delta)  # noqa: PERF401  (they must be seen one by one)

        reading = asyncio.create_task(read())
        await settle()
        await steps(inner, 2)
        await update(engine, 3, "abort")
        await steps(inner, 3)
        await reading
        assert [token for delta in deltas for token in delta.token_ids] == [11, 12, 13, 14, 15]
        assert [v for delta in deltas for v in delta.policy_versions] == [0, 0, 3, 3, 3]
        reasons = [delta.finish_reason for delta in deltas]
        assert reasons == [None] * (len(deltas) - 1) + ["length"]

    asyncio.run(run())


def test_aborted_requests_wait_until_all_is_awake() -> None:
    """Sleep interrupts like an update; the caches are the last to come back."""

    async def run() -> None:
        inner = CountingEngine()
        engine = ResumingEngine(inner)
        drawing = draw(engine)
        await settle()
        await steps(inner, 1)
        await engine.hold("abort")
        await engine.sleep(keep_weights=True)
        await settle()
        await engine.wake(("weights",))
        await settle()
        assert list(inner.asked) == ["a"]
        await engine.wake(("kv_cache",))
        await steps(inner, 4)
        assert (await drawing)[0].token_ids == (11, 12, 13, 14, 15)

    asyncio.run(run())


def test_a_closing_engine_lets_nobody_wait() -> None:
    """A request that waits for an update that never ends returns what it has."""

    async def run() -> None:
        inner = CountingEngine()
        engine = ResumingEngine(inner)
        drawing = draw(engine)
        await settle()
        await steps(inner, 1)
        await engine.hold("abort")
        await settle()
        engine.shutdown()
        (completion,) = await asyncio.wait_for(drawing, 5)
        assert completion.token_ids == (11,)
        assert inner.shut_down

    asyncio.run(run())


def test_seeds_of_the_rest_differ_and_repeat() -> None:
    """The same prefix length gives the same seed again, another one another; none stays none."""
    again = [continued_params(PARAMS, drawn).seed for drawn in (0, 1, 2, 1)]
    assert again[0] == 7
    assert again[1] == again[3]
    assert len(set(again)) == 3
    assert all(seed is not None and 0 <= seed < 2**63 for seed in again)
    assert continued_params(SamplingParams(max_new_tokens=2), 1).seed is None


def test_an_interrupted_prompt_keeps_its_images() -> None:
    """After an update the rest is drawn from the same images; so is that of a stream."""

    async def run() -> None:
        inner = CountingEngine()
        engine = ResumingEngine(inner)
        rgb = np.zeros((1, 1, 3), dtype=np.uint8)
        shown = (PromptImage(rgb=rgb, first_token=0, num_tokens=1),)
        options, params = RequestOptions(), SamplingParams(max_new_tokens=2)
        drawing = asyncio.ensure_future(
            engine.generate("a", [10], num_samples=1, params=params, options=options, images=shown)
        )
        await settle()
        await steps(inner, 1)
        await update(engine, 1, "abort")
        await steps(inner, 1)
        await drawing

        async def read() -> int:
            deltas = engine.stream("b", [10], params=params, options=options, images=shown)
            return len([delta async for delta in deltas])

        reading = asyncio.ensure_future(read())
        await settle()
        await steps(inner, 1)
        await update(engine, 2, "abort")
        await steps(inner, 1)
        await reading
        assert inner.images == [shown] * 4

    asyncio.run(run())
