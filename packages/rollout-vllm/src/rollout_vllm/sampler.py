"""The sampler: token ids in, completions out, new weights while it runs.

::

    caller's process                                  engine process (one child)
    VllmSampler ── AsyncLLM ── requests, tokens ────▶ scheduler, worker, model
        │                                                     ▲
        └── load_published: check files, then                 │
            hold requests, clear caches ─▶ load ─▶ name the version ─▶ go on

    open ──▶ closed     by close(), or because the engine died or an update broke off half-way
"""

import asyncio
import contextlib
import itertools
import operator
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, final

from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm.config import Dtype, VllmConfig
from rollout_vllm.engine import Engine
from rollout_vllm.environment import applied_environment, check_engine_environment
from rollout_vllm.errors import SamplerClosedError, SamplerDiedError, WeightUpdateError
from rollout_vllm.headers import TensorHeader, read_model_headers
from rollout_vllm.readback import check_settings
from rollout_vllm.weights_check import check_published
from rollout_vllm.weights_sender import PublishedWeights, TensorLike, publish_weights

# vLLM raises lower temperatures to this one (_MAX_TEMP in vllm/sampling_params.py, 0.32)
_LOWEST_TEMPERATURE = 0.01
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
        self._policy_version = policy_version
        self._tensors = tensors
        self._request_numbers = itertools.count()
        self._running: set[str] = set()
        self._closed: SamplerClosedError | None = None
        self._loading = asyncio.Lock()

    @classmethod
    async def start(cls, config: VllmConfig, *, policy_version: PolicyVersion) -> Self:
        """Start vLLM with the weights in the model's folder.

        Takes 15 to 40 seconds on two cores, during which the event loop stands still. The engine
        runs in one child process, which imports the caller's main module: guard a script with
        ``if __name__ == "__main__":``.

        Args:
            config: how to sample.
            policy_version: optimizer steps behind the weights in the folder.

        Raises:
            ValueError: if the environment contradicts the config, the model's folder is not
                usable, or the installed vLLM is not supported.
            StartError: if vLLM does not start, or runs something else than was configured.
        """
        arguments = config.effective_engine_args()
        tensors = read_model_headers(Path(config.model))
        with applied_environment(config):
            from rollout_vllm.vllm_engine import VllmEngine  # noqa: PLC0415  (imports vLLM)

            engine = VllmEngine.start(
                {name: argument.value for name, argument in arguments.items()}
            )
        try:
            await engine.prepare_weight_updates()
            await engine.set_version(policy_version)
            check_settings(arguments, await engine.settings())
            check_engine_environment(config, await engine.environment())
        except BaseException:
            engine.shutdown()
            raise
        return cls(engine, config=config, policy_version=policy_version, tensors=tensors)

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
        return self._policy_version

    @property
    def dtype(self) -> Dtype:
        """Type in which the sampler computes, and in which weights must be published."""
        return self._config.dtype

    @property
    def num_running(self) -> int:
        """Calls of `sample` that have not returned."""
        return len(self._running)

    async def sample(
        self, prompt_ids: Sequence[int], *, num_samples: int, params: SamplingParams
    ) -> list[Completion]:
        """Draw `num_samples` completions of one prompt.

        `rollout_logprobs` are those of the distribution that each token was drawn from: after
        temperature and `top_p`; greedy tokens get those of temperature 1. With a seed, sample
        ``i`` has the seed ``params.seed + i``. The model's own end of sequence (its generation
        config) ends a completion beside `stop_token_ids`. A completion also ends, with the
        reason `length`, where prompt and completion fill `max_model_len`.

        Cancelling the awaiting task frees the requests' places.

        Raises:
            ValueError: for an empty prompt, a prompt that leaves no room for a token, a token id
                that the model does not know, `num_samples` below 1, or parameters that vLLM
                would change.
            GenerationError: if vLLM fails on this request.
            SamplerClosedError: if the sampler is or gets closed.
        """
        self._check_open()
        prompt = self._checked_prompt(prompt_ids)
        if num_samples < 1:
            raise ValueError(f"sample: expected num_samples of 1 or more, got {num_samples}")
        self._check_params(params)
        request_id = str(next(self._request_numbers))
        self._running.add(request_id)
        try:
            completions = await self._engine.generate(
                request_id, prompt, num_samples=num_samples, params=params
            )
        except SamplerDiedError as error:
            self._close_for(error)
            raise
        finally:
            self._running.discard(request_id)
        self._check_open()  # aborted because the sampler closed: not a completion to train on
        return completions

    async def load_weights(
        self, weights: Iterable[tuple[str, TensorLike]], *, version: PolicyVersion
    ) -> None:
        """Take new weights from this process: publishes them, then `load_published`.

        Raises:
            ValueError: as `load_published`; the old weights then go on answering.
            TypeError: if something is not a tensor.
            WeightUpdateError: as `load_published`.
            SamplerClosedError: if the sampler is closed.
        """
        self._check_open()
        folder = Path(tempfile.mkdtemp(prefix="rollout-vllm-", dir=_SHARED_MEMORY))
        try:
            published = publish_weights(weights, version=version, folder=folder, dtype=self.dtype)
            await self.load_published(published)
        finally:
            shutil.rmtree(folder)

    async def load_published(self, published: PublishedWeights, *, keep: bool = False) -> None:
        """Take weights that `publish_weights` wrote on this machine.

        Running requests are kept: their later tokens are drawn from the new weights, given the
        whole prefix under the new weights. All caches are cleared.

        Args:
            published: what to load.
            keep: leave the files, for other samplers. By default they are removed once loaded;
                files that were refused stay.

        Raises:
            ValueError: for a name that the model lacks, a weight that is missing, a shape or type
                that differs, damaged files, or a version below the present one while requests
                run; nothing was touched and the old weights go on answering.
            WeightUpdateError: if it broke off after that; the sampler has closed itself.
            SamplerClosedError: if the sampler is closed.
        """
        async with self._loading:
            self._check_open()
            if published.version < self._policy_version and self._running:
                message = (
                    f"load_published: expected version {self._policy_version} or later while "
                    f"{len(self._running)} requests run (versions never fall along a completion), "
                    f"got {published.version}"
                )
                raise ValueError(message)
            await asyncio.to_thread(
                check_published,
                published,
                model=self._tensors,
                dtype=self.dtype,
                tied=self._engine.tied,
            )
            update = asyncio.ensure_future(self._update(published))
            try:
                await asyncio.shield(update)
            except asyncio.CancelledError:
                # half an update is no state to stop in
                await update
                raise
        if not keep:
            published.remove()

    async def close(self) -> None:
        """End running requests and the engine's process; may be called twice."""
        if self._closed is None:
            await self._end_requests(SamplerClosedError("the sampler was closed"))
            self._engine.shutdown()

    async def _update(self, published: PublishedWeights) -> None:
        limit = self._config.weight_update_timeout_s
        try:
            async with asyncio.timeout(limit):
                await self._engine.update_weights(
                    published.paths(), version=published.version, tied=self._engine.tied
                )
        except TimeoutError as error:
            message = (
                f"load_published: the engine did not take version {published.version} within "
                f"{limit:g} s (VllmConfig.weight_update_timeout_s)"
            )
            failure = WeightUpdateError(message)
            await self._break_off(failure)
            raise failure from error
        except SamplerClosedError as error:
            await self._break_off(error)
            raise
        self._policy_version = published.version

    async def _break_off(self, error: SamplerClosedError) -> None:
        await self._end_requests(error)
        self._engine.shutdown()

    async def _end_requests(self, error: SamplerClosedError) -> None:
        self._closed = error
        # a dead engine has ended its requests itself
        with contextlib.suppress(SamplerDiedError):
            await self._engine.abort(list(self._running))

    def _close_for(self, error: SamplerClosedError) -> None:
        if self._closed is None:
            self._closed = error
            self._engine.shutdown()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise type(self._closed)(str(self._closed)) from self._closed

    def _checked_prompt(self, prompt_ids: Sequence[int]) -> list[int]:
        prompt = [operator.index(token) for token in prompt_ids]
        longest = self._engine.max_model_len - 1
        if not 1 <= len(prompt) <= longest:
            message = (
                f"sample: expected a prompt of 1 to {longest} tokens (max_model_len is "
                f"{self._engine.max_model_len}, and one token must fit behind it), "
                f"got {len(prompt)}"
            )
            raise ValueError(message)
        self._check_ids(prompt, "prompt_ids")
        return prompt

    def _check_ids(self, token_ids: Sequence[int], name: str) -> None:
        vocab_size = self._engine.vocab_size
        for place, token in enumerate(token_ids):
            if not 0 <= token < vocab_size:
                message = (
                    f"sample: {name}[{place}] is {token}, the model knows the token ids "
                    f"0 to {vocab_size - 1}"
                )
                raise ValueError(message)

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        if 0.0 < params.temperature < _LOWEST_TEMPERATURE:
            message = (
                f"sample: vLLM raises temperature {params.temperature} to {_LOWEST_TEMPERATURE}; "
                "give 0 for greedy tokens"
            )
            raise ValueError(message)
        if params.temperature == 0.0 and params.top_p != 1.0:
            message = (
                f"sample: top_p = {params.top_p} has no effect at temperature 0; give top_p = 1"
            )
            raise ValueError(message)
        if params.seed is not None and params.seed < 0:
            message = f"sample: expected a seed of 0 or more, or None, got {params.seed}"
            raise ValueError(message)
