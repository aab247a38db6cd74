"""The seam's other side: vLLM's `AsyncLLM`, its types and its exceptions.

The only module of the caller's process that imports vLLM; it is imported when a sampler starts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self, final

from vllm import SamplingParams as EngineSamplingParams
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMError
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rl_contracts.rollout import Completion, FinishReason, PolicyVersion, SamplingParams
from rollout_vllm.errors import (
    GenerationError,
    SamplerDiedError,
    StartError,
    WeightUpdateError,
)

_FINISH_REASONS: Mapping[str | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
}


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except EngineDeadError as error:
        raise SamplerDiedError(
            "vLLM's engine process died; its own message stands above in the log"
        ) from error


@final
class VllmEngine:
    """An `rollout_vllm.engine.Engine` made of vLLM's `AsyncLLM`."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    @classmethod
    def start(cls, arguments: Mapping[str, object]) -> Self:
        """Start the engine's process and wait until it is ready.

        Raises:
            StartError: if it does not come up.
        """
        if not current_platform.is_cpu():
            message = (
                f"the installed vLLM runs on {current_platform.device_name}; this release of "
                "rollout-vllm has been run on the CPU only: install it with the extra `cpu`"
            )
            raise StartError(message)
        try:
            engine_args = AsyncEngineArgs(**arguments)  # type: ignore[arg-type]
            return cls(AsyncLLM.from_engine_args(engine_args))
        except (RuntimeError, ValueError, TypeError, OSError, VLLMError) as error:
            raise StartError(f"vLLM did not start: {error}") from error

    @property
    def max_model_len(self) -> int:
        """Longest prompt and completion together, in tokens."""
        return self._engine.model_config.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model knows."""
        return self._engine.model_config.get_vocab_size()

    @property
    def tied(self) -> bool:
        """Whether the head shares the embedding's weight."""
        return bool(getattr(self._engine.model_config.hf_text_config, "tie_word_embeddings", False))

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        params: SamplingParams,
    ) -> list[Completion]:
        """Draw completions; cancelling it frees their places."""
        # Greedy samples of one prompt are all the same, and vLLM refuses to draw several.
        greedy = params.temperature == 0.0
        sampling = EngineSamplingParams(
            n=1 if greedy else num_samples,
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_new_tokens,
            stop_token_ids=list(params.stop_token_ids),
            seed=params.seed,
            logprobs=0,  # the sampled token's own
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = tokens_input(list(prompt_ids))
        with _translated():
            try:
                async for output in self._engine.generate(prompt, sampling, request_id):
                    final = output
            except EngineDeadError:
                raise
            except VLLMError as error:
                cause = error.__cause__ or error
                raise GenerationError(f"vLLM failed on a request: {cause}") from error
        completions = [_completion(output) for output in final.outputs]
        return completions * num_samples if greedy else completions

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; `generate` returns what they have, with the reason `abort`."""
        with _translated():
            await self._engine.abort(list(request_ids))

    async def prepare_weight_updates(self) -> None:
        """Set up the transfer that `update_weights` uses."""
        with _translated():
            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest())

    async def update_weights(
        self, paths: Sequence[Path], *, version: PolicyVersion, tied: bool
    ) -> None:
        """Hold all requests, clear all caches, load the files, name the version, go on."""
        info = {"paths": [str(path) for path in paths], "tied": tied}
        with _translated():
            try:
                # without clear_cache, later prompts would reuse the old weights' prefixes, and
                # running requests their old keys and values
                await self._engine.pause_generation(mode="keep", clear_cache=True)
                await self._engine.start_weight_update()
                await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))
                await self._engine.finish_weight_update(weight_version=str(version))
                await self._engine.resume_generation()
            except EngineDeadError:
                raise
            except Exception as error:
                # the border of the engine's process: vLLM raises a bare Exception for whatever
                # went wrong over there, and the sampler closes itself on this error
                message = f"the update to version {version} broke off in the engine: {error}"
                raise WeightUpdateError(message) from error

    async def set_version(self, version: PolicyVersion) -> None:
        """Name the version of the present weights."""
        with _translated():
            await self._engine.update_weight_version(str(version))

    async def settings(self) -> Mapping[str, Mapping[str, object]]:
        """Plain values of the engine's resolved config, by part."""
        with _translated():
            (reported,) = await self._engine.collective_rpc("rollout_settings")
        return _as_settings(reported)

    async def environment(self) -> Mapping[str, str]:
        """Variables that vLLM and OpenMP read, as the engine's process found them."""
        with _translated():
            (found,) = await self._engine.collective_rpc("rollout_environment")
        return {str(name): str(value) for name, value in found.items()}

    def shutdown(self) -> None:
        """End the engine's process; may be called twice, from the loop that used it."""
        self._engine.shutdown()
        # vLLM closes its sockets, and leaves the context and its threads to the garbage collector
        self._engine.engine_core.resources.ctx.destroy(linger=0)


def _as_settings(reported: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
    return {str(part): dict(values) for part, values in reported.items()}


def _completion(output: CompletionOutput) -> Completion:
    token_ids = tuple(output.token_ids)
    logprobs = output.logprobs
    if token_ids and not isinstance(logprobs, FlatLogprobs):
        raise GenerationError(f"vLLM returned no logprobs for {len(token_ids)} tokens")
    values = tuple(logprobs.logprobs) if isinstance(logprobs, FlatLogprobs) else ()
    if len(values) != len(token_ids):
        message = f"vLLM returned {len(values)} logprobs for {len(token_ids)} tokens"
        raise GenerationError(message)
    if not all(math.isfinite(value) for value in values):
        place = next(i for i, value in enumerate(values) if not math.isfinite(value))
        message = (
            f"vLLM gave token {place} of {len(values)} the logprob {values[place]}; the weights "
            "it was last given are probably not finite"
        )
        raise GenerationError(message)
    reason = _FINISH_REASONS.get(output.finish_reason)
    if reason is None:
        raise GenerationError(f"vLLM ended a request for the reason {output.finish_reason!r}")
    versions = [
        PolicyVersion(int(span.version))
        for span in output.weight_versions or ()
        for _ in range(span.start, span.end)
    ]
    return Completion(
        token_ids=token_ids,
        rollout_logprobs=values,
        policy_versions=tuple(versions),
        finish_reason=reason,
    )
