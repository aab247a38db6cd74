"""The sampler: token ids in, completions out, new weights while it runs.

::

    caller's process                                  engine process (one child)
    VllmSampler ── AsyncLLM ── requests, tokens ────▶ scheduler, worker, model
        │                                                     ▲
        └── load_published: check files, then                 │
            hold requests, clear caches ─▶ load ─▶ name the version ─▶ go on
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, final

from rl_contracts.images import PromptImage
from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm.admission import Admission
from rollout_vllm.config import Dtype, VllmConfig
from rollout_vllm.engine import Engine, InFlight
from rollout_vllm.errors import SamplerClosedError
from rollout_vllm.headers import TensorHeader
from rollout_vllm.in_flight import ResumingEngine
from rollout_vllm.lifetime import Lifetime
from rollout_vllm.model_checks import check_model
from rollout_vllm.options import RequestOptions, TokenDelta
from rollout_vllm.publication import Publication
from rollout_vllm.request_checks import check_images, check_params, checked_prompt
from rollout_vllm.sleep import PARTS, MemoryChange, Part
from rollout_vllm.starting import bound_server, model_tensors, serve, started_engine
from rollout_vllm.weight_updates import WeightUpdates
from rollout_vllm.weights_sender import TensorLike, publish_weights

if TYPE_CHECKING:  # imports what comes with vLLM
    from rollout_vllm.server import Server

_PLAIN = RequestOptions()
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (memory, under a fresh private folder)


@final
class VllmSampler:
    """Samples with vLLM and takes new weights while it runs.

    Implements `rl_contracts.rollout.Sampler` and `rl_contracts.train.WeightSink`. Made with
    `VllmSampler.start`. Safe to use from many tasks of one event loop.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        config: VllmConfig,
        policy_version: PolicyVersion,
        tensors: Mapping[str, TensorHeader],
    ) -> None:
        self._engine = engine
        self._config = config
        self._lifetime = Lifetime(engine)
        self._weights = WeightUpdates(
            engine,
            self._lifetime,
            config=config,
            policy_version=policy_version,
            tensors=tensors,
        )
        self._admission = Admission(self._lifetime, self._weights)
        self._server: Server | None = None

    @classmethod
    async def start(cls, config: VllmConfig, *, policy_version: PolicyVersion) -> Self:
        """Start vLLM with the weights in the model's folder.

        Takes 15 to 40 seconds on two cores, during which the event loop stands still. The engine
        runs in one child process, which imports the caller's main module: guard a script with
        ``if __name__ == "__main__":``.

        Args:
            config: how to sample.
            policy_version: optimizer steps behind the weights in the folder; with
                `VllmConfig.lora` those are without an adapter, so load the present one before
                anything is drawn if training goes on from a checkpoint.

        Raises:
            ValueError: if the environment contradicts the config, the model's folder is not
                usable, the installed vLLM is not supported, or the server's key is not there.
            StartError: if vLLM does not start, or runs something else than was configured, or
                the server's port is taken.
        """
        config.effective_engine_args()  # refuses an unsupported vLLM before anything starts
        check_model(config)
        tensors = model_tensors(config)
        async with contextlib.AsyncExitStack() as undo:
            server = bound_server(config)
            if server is not None:
                undo.push_async_callback(server.close)
            engine = await started_engine(config, policy_version=policy_version, tensors=tensors)
            undo.callback(engine.shutdown)
            sampler = cls(
                ResumingEngine(engine),
                config=config,
                policy_version=policy_version,
                tensors=tensors,
            )
            if server is not None:
                await serve(server, engine, sampler._admission, config=config)
                sampler._server = server
            undo.pop_all()
        return sampler

    async def __aenter__(self) -> Self:
        """The sampler itself."""
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        await self.close()

    @property
    def policy_version(self) -> PolicyVersion:
        """Version of the weights that the next token will be drawn from."""
        return self._weights.policy_version

    @property
    def dtype(self) -> Dtype:
        """Type in which the sampler computes, and in which weights must be published."""
        return self._config.dtype

    @property
    def server_url(self) -> str:
        """Base URL for clients of `VllmConfig.server`, with the port that it really has.

        Raises:
            ValueError: if there is no server.
        """
        if self._server is None:
            raise ValueError("server_url: there is no server; give VllmConfig.server")
        return self._server.url

    @property
    def num_running(self) -> int:
        """Calls of `sample` and requests of the server that have not returned."""
        return len(self._lifetime.running)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        params: SamplingParams,
        options: RequestOptions = _PLAIN,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        """Draw `num_samples` completions of one prompt.

        `rollout_logprobs` are those of the distribution that each token was drawn from: after
        temperature, `top_p` and `top_k`; greedy tokens get those of temperature 1. With a seed,
        sample ``i`` has the seed ``params.seed + i``. The model's own end of sequence (its
        generation config) ends a completion beside `stop_token_ids`. A completion also ends, with
        the reason `length`, where prompt and completion fill `max_model_len`, and with the reason
        `abort`, holding what it has, at `options.deadline_s`.

        `images` stand at their placeholders in `prompt_ids`, all of which are there. A completion
        whose prompt vLLM would read otherwise than `prompt_ids` is an error.

        Cancelling the awaiting task frees the requests' places.

        Raises:
            ValueError: for an empty prompt, a prompt that leaves no room for a token, a token id
                that the model does not know, `num_samples` below 1, parameters that vLLM would
                change or that have no effect, or images that do not stand at placeholders or are
                more than `VllmConfig.images_per_prompt`.
            GenerationError: if vLLM fails on this request.
            SamplerClosedError: if the sampler is or gets closed.
        """
        self._admission.check()
        prompt = checked_prompt(prompt_ids, engine=self._engine)
        check_params(params, options, num_samples=num_samples, engine=self._engine)
        check_images(prompt, images, most=self._config.images_per_prompt)
        with self._admission.request() as request_id:
            drawing = self._engine.generate(
                request_id,
                prompt,
                num_samples=num_samples,
                params=params,
                options=options,
                images=images,
            )
            if options.deadline_s is None:
                completions = await drawing
            else:
                completions = await self._until_deadline(request_id, drawing, options.deadline_s)
        # aborted because the sampler closed: not a completion to train on
        self._admission.check_open()
        return completions

    async def stream(
        self,
        prompt_ids: Sequence[int],
        *,
        params: SamplingParams,
        options: RequestOptions = _PLAIN,
        images: Sequence[PromptImage] = (),
    ) -> AsyncGenerator[TokenDelta, None]:
        """Draw one completion and yield its tokens as they are drawn.

        The deltas joined are the completion that `sample` would return. Leaving the loop early
        does not free the request's place until the generator is closed: use
        `contextlib.aclosing`.

        Raises:
            ValueError: as `sample`; and for a deadline, which is `asyncio.timeout`'s business
                around a loop.
            GenerationError: if vLLM fails on this request.
            SamplerClosedError: if the sampler is or gets closed.
        """
        self._admission.check()
        prompt = checked_prompt(prompt_ids, engine=self._engine)
        check_params(params, options, num_samples=1, engine=self._engine)
        check_images(prompt, images, most=self._config.images_per_prompt)
        if options.deadline_s is not None:
            message = (
                f"stream: deadline_s = {options.deadline_s} is for sample; break the loop, or put "
                "it under asyncio.timeout"
            )
            raise ValueError(message)
        with self._admission.request() as request_id:
            deltas = self._engine.stream(
                request_id, prompt, params=params, options=options, images=images
            )
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    self._admission.check_open()
                    yield delta

    async def load_weights(
        self,
        weights: Iterable[tuple[str, TensorLike]],
        *,
        version: PolicyVersion,
        in_flight: InFlight = "keep",
    ) -> None:
        """Take new weights from this process: publishes files of them, then `load_published`.

        With `VllmConfig.lora` these are the matrices of an adapter, under peft's names.

        Raises:
            ValueError: as `load_published`; the old weights then go on answering.
            TypeError: if something is not a tensor.
            WeightUpdateError: as `load_published`.
            SamplerClosedError: if the sampler is closed.
        """
        self._lifetime.check_open()
        folder = Path(tempfile.mkdtemp(prefix="rollout-vllm-", dir=_SHARED_MEMORY))
        try:
            published = publish_weights(weights, version=version, folder=folder, dtype=self.dtype)
            await self.load_published(published, in_flight=in_flight)
        finally:
            shutil.rmtree(folder)

    async def load_published(
        self, published: Publication, *, keep: bool = False, in_flight: InFlight = "keep"
    ) -> None:
        """Take weights that `publish_weights` wrote, or that a `WeightStream` offers.

        All caches are cleared. Tokens keep the version and the logprobs of the weights that drew
        them.

        Args:
            published: what to load.
            keep: leave the files, for other samplers. By default they are removed once loaded;
                files that were refused stay. Without effect on a stream, which keeps its own.
            in_flight: what becomes of running requests, see `rollout_vllm.in_flight`.

        Raises:
            ValueError: for a name that the model lacks, a weight that is missing, a shape or type
                that differs, damaged files, or a version below the present one while requests
                run; nothing was touched and the old weights go on answering.
            TimeoutError: with `wait`, if requests run longer than the config's
                `weight_update_timeout_s`; nothing was touched.
            ConnectionError: if a stream's sender is not reached; nothing was touched.
            WeightUpdateError: if it broke off after that; the sampler has closed itself.
            SamplerClosedError: if the sampler is closed.
        """
        await self._weights.load(published, keep=keep, in_flight=in_flight)

    async def check_published(self, published: Publication) -> None:
        """Whether `load_published` would take these weights; moves none.

        Raises:
            ValueError: as `load_published`; a stream's sender is not told.
            SamplerAsleepError: if the weights sleep.
            SamplerClosedError: if the sampler is closed.
        """
        await self._weights.check(published)

    async def sleep(self, *, keep_weights: bool, in_flight: InFlight = "keep") -> MemoryChange:
        """Give up the memory of weights and caches until `wake`; see `rollout_vllm.sleep`.

        Args:
            keep_weights: keep a copy of the weights in the host's memory. Without, weights must be
                loaded again before the sampler is whole.
            in_flight: what becomes of running requests; kept and aborted ones go on from their
                prefix once everything is awake.

        Returns:
            The memory in use on the engine's devices before and after.

        Raises:
            ValueError: if the sampler was not started with `enable_sleep`, so on the CPU always.
            SamplerAsleepError: if it sleeps already.
            TimeoutError: with `wait`, if requests run longer than the config's
                `weight_update_timeout_s`; they go on.
            SamplerClosedError: if the sampler is closed.
        """
        return await self._weights.sleep(keep_weights=keep_weights, in_flight=in_flight)

    async def wake(self, parts: Sequence[Part] = PARTS) -> MemoryChange:
        """Take the memory of these parts back; once all are awake, requests go on.

        Returns:
            The memory in use on the engine's devices before and after.

        Raises:
            ValueError: if one of the parts does not sleep.
            SamplerAsleepError: if requests would go on without weights.
            SamplerClosedError: if the sampler is closed.
        """
        return await self._weights.wake(parts)

    async def ping(self) -> PolicyVersion:
        """The version of the weights, if the engine is alive and answers.

        Raises:
            SamplerClosedError: if it is not.
        """
        self._lifetime.check_open()
        with self._lifetime.ends_with_engine():
            await self._engine.environment()
        return self.policy_version

    async def close(self) -> None:
        """End running requests, the engine's process and the server; may be called twice."""
        await self._lifetime.end(SamplerClosedError("the sampler was closed"))
        if self._server is not None:
            await self._server.close()

    async def _until_deadline(
        self, request_id: str, drawing: Coroutine[None, None, list[Completion]], deadline_s: float
    ) -> list[Completion]:
        """Abort what still runs at the deadline; it then returns what it has."""
        task = asyncio.ensure_future(drawing)
        try:
            ended, _ = await asyncio.wait({task}, timeout=deadline_s)
            if not ended:
                await self._engine.abort([request_id])
            return await task
        finally:
            task.cancel()  # nothing happens if it has ended
