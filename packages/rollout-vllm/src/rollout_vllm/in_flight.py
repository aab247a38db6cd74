"""What becomes of running requests when new weights come.

=======  =============================================  ========================================
mode     running requests                               versions of one completion
=======  =============================================  ========================================
keep     stand still meanwhile, then go on               old, then new; later tokens are drawn
                                                         given the whole prefix under the new
                                                         weights
abort    end at once, free their places, and start       the same; other requests may come first
         again from their prefix afterwards
wait     are waited for; requests that have no place     one, unless the engine had taken a
         yet stay in the queue                           request's place away in the middle
=======  =============================================  ========================================

Requests of the sampler's server are kept where it says "abort": vLLM's own code answers them, and
would hand a cut answer to the client.

In every mode all caches are cleared, and tokens keep the logprobs of the weights that drew them.
"""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple, final

import attrs

from rl_contracts.images import PromptImage
from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm.engine import Engine, InFlight
from rollout_vllm.gathered import gathered
from rollout_vllm.options import RequestOptions, TokenDelta
from rollout_vllm.sleep import PARTS, Part

# spreads the seeds of continued samples: the odd number next to 2^63 / golden ratio
_SEED_STEP = 5_700_357_409_661_599_241
_LARGEST_SEED = 2**63


def continued_params(params: SamplingParams, num_drawn: int) -> SamplingParams:
    """Parameters of the rest of a sample; a seed gives other draws than its first tokens had."""
    seed = params.seed
    return attrs.evolve(
        params,
        max_new_tokens=params.max_new_tokens - num_drawn,
        seed=None if seed is None else (seed + num_drawn * _SEED_STEP) % _LARGEST_SEED,
    )


def joined(first: Completion, rest: Completion) -> Completion:
    """One completion of two parts; each token keeps its logprob and its version."""
    return dataclasses.replace(  # a routed completion's experts are those of the whole: the rest's
        rest,
        token_ids=first.token_ids + rest.token_ids,
        rollout_logprobs=first.rollout_logprobs + rest.rollout_logprobs,
        policy_versions=first.policy_versions + rest.policy_versions,
    )


class _Drawing:
    """One call of `generate` or `stream` that has not returned."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        """The caller wants no more of it."""

        self.running: set[str] = set()
        """Names under which the engine draws parts of it now."""

        self.interrupted: set[str] = set()
        """Of these, the parts that an update has ended."""


class _Request(NamedTuple):
    """What is asked of the engine, but for the number of samples."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    options: RequestOptions
    images: Sequence[PromptImage]


@final
class ResumingEngine:
    """An `Engine` whose requests survive an update of the weights in every mode.

    Wraps one that ends them with the reason `abort` when it is held in that mode.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._drawings: dict[str, _Drawing] = {}
        self._ending = False  # an update is about to end what runs
        self._asleep: set[Part] = set()
        self._going = asyncio.Event()
        self._going.set()

    @property
    def max_model_len(self) -> int:
        """Longest prompt and completion together, in tokens."""
        return self._engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model knows."""
        return self._engine.vocab_size

    @property
    def tied(self) -> bool:
        """Whether the head shares the embedding's weight."""
        return self._engine.tied

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
        """Draw completions, from their prefix again if an update ended them."""
        drawing = self._drawings[request_id] = _Drawing()
        greedy = params.temperature == 0.0
        try:
            request = _Request(prompt_ids, params, options, images)
            drawn, interrupted = await self._part(drawing, request_id, request, num_samples)
            if not interrupted:
                return drawn
            samples = drawn[:1] if greedy else drawn  # greedy samples are all the same
            completions = await gathered(
                self._rest(drawing, f"{request_id}/{i}", request, first)
                for i, first in enumerate(samples)
            )
            return completions * num_samples if greedy else completions
        finally:
            del self._drawings[request_id]

    async def stream(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        params: SamplingParams,
        options: RequestOptions,
        images: Sequence[PromptImage] = (),
    ) -> AsyncGenerator[TokenDelta, None]:
        """Draw one completion, from its prefix again if an update ended it."""
        drawing = self._drawings[request_id] = _Drawing()
        drawn: list[int] = []
        part = request_id
        try:
            while True:
                self._begin(drawing, part)
                interrupted = False
                deltas = self._engine.stream(
                    part,
                    [*prompt_ids, *drawn],
                    params=continued_params(params, len(drawn)),
                    options=_continued_options(options, len(drawn)),
                    images=images,
                )
                async with aclosing(deltas):
                    async for delta in deltas:
                        drawn += delta.token_ids
                        interrupted = (
                            delta.finish_reason == "abort"
                            and part in drawing.interrupted
                            and not drawing.ended.is_set()
                        )
                        yield _open_ended(delta) if interrupted else delta
                drawing.running.discard(part)
                if not interrupted:
                    return
                await self._until_going(drawing)
                if drawing.ended.is_set():
                    yield TokenDelta(
                        token_ids=(),
                        rollout_logprobs=(),
                        policy_versions=(),
                        finish_reason="abort",
                    )
                    return
                part = f"{request_id}/{len(drawn)}"
        finally:
            del self._drawings[request_id]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; `generate` returns what they have, with the reason `abort`."""
        parts: list[str] = []
        for request_id in request_ids:
            drawing = self._drawings.get(request_id)
            if drawing is None:  # a request of the server, or one that has ended
                parts.append(request_id)
            else:
                drawing.ended.set()
                parts += drawing.running
        await self._engine.abort(parts)

    async def hold(self, in_flight: InFlight) -> None:
        """Hold all requests and clear all caches."""
        self._going.clear()
        if in_flight == "abort":
            for drawing in self._drawings.values():
                drawing.interrupted |= drawing.running
        self._ending = in_flight == "abort"
        try:
            await self._engine.hold(in_flight)
        finally:
            self._ending = False

    async def update_weights(
        self, instructions: Mapping[str, object], *, version: PolicyVersion
    ) -> None:
        """Load, and name the version."""
        await self._engine.update_weights(instructions, version=version)

    async def go_on(self) -> None:
        """Let all requests go on, interrupted ones too."""
        await self._engine.go_on()
        self._going.set()

    async def sleep(self, *, keep_weights: bool) -> None:
        """Give up the memory of weights and caches. Only while requests are held."""
        self._asleep = set(PARTS)
        await self._engine.sleep(keep_weights=keep_weights)

    async def wake(self, parts: Sequence[Part]) -> None:
        """Take the memory of these parts back; once all are awake, requests go on."""
        await self._engine.wake(parts)
        self._asleep -= set(parts)
        if not self._asleep:
            self._going.set()

    async def used_memory(self) -> int:
        """Bytes in use on the engine's devices together, by whomever."""
        return await self._engine.used_memory()

    async def settings(self) -> Mapping[str, Mapping[str, object]]:
        """Plain values of the engine's resolved config, by part, and of its process."""
        return await self._engine.settings()

    async def environment(self) -> Mapping[str, str]:
        """Variables that vLLM and OpenMP read, as the engine's process found them."""
        return await self._engine.environment()

    def shutdown(self) -> None:
        """End the engine's process; may be called twice."""
        for drawing in self._drawings.values():
            drawing.ended.set()
        self._engine.shutdown()

    def _begin(self, drawing: _Drawing, part: str) -> None:
        drawing.running.add(part)
        if self._ending:  # it may reach the engine before that holds
            drawing.interrupted.add(part)

    async def _part(
        self, drawing: _Drawing, part: str, request: _Request, num_samples: int
    ) -> tuple[list[Completion], bool]:
        """Completions as far as they got, and whether an update has ended some of them."""
        self._begin(drawing, part)
        try:
            drawn = await self._engine.generate(
                part,
                request.prompt_ids,
                num_samples=num_samples,
                params=request.params,
                options=request.options,
                images=request.images,
            )
        finally:
            drawing.running.discard(part)
        interrupted = part in drawing.interrupted and not drawing.ended.is_set()
        return drawn, interrupted and any(one.finish_reason == "abort" for one in drawn)

    async def _rest(
        self, drawing: _Drawing, name: str, request: _Request, first: Completion
    ) -> Completion:
        """The whole of a completion that an update may have ended, again and again."""
        interrupted = first.finish_reason == "abort"
        while interrupted:
            await self._until_going(drawing)
            if drawing.ended.is_set():
                break
            num_drawn = len(first.token_ids)
            left = _Request(
                [*request.prompt_ids, *first.token_ids],
                continued_params(request.params, num_drawn),
                _continued_options(request.options, num_drawn),
                request.images,
            )
            (rest,), interrupted = await self._part(drawing, f"{name}/{num_drawn}", left, 1)
            first = joined(first, rest)
        return first

    async def _until_going(self, drawing: _Drawing) -> None:
        waits = [
            asyncio.ensure_future(self._going.wait()),
            asyncio.ensure_future(drawing.ended.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _continued_options(options: RequestOptions, num_drawn: int) -> RequestOptions:
    return attrs.evolve(options, min_new_tokens=max(0, options.min_new_tokens - num_drawn))


def _open_ended(delta: TokenDelta) -> TokenDelta:
    return TokenDelta(
        token_ids=delta.token_ids,
        rollout_logprobs=delta.rollout_logprobs,
        policy_versions=delta.policy_versions,
        finish_reason=None,
    )
