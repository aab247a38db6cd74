"""The seam's other side: vLLM's `AsyncLLM`, its types and its exceptions.

The only module of the caller's process that imports vLLM; it is imported when a sampler starts.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Self, final

from vllm import exceptions
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import EngineInput
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams as EngineSamplingParams
from vllm.tool_parsers import ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from rl_contracts.images import PromptImage
from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm.device_rules import Device
from rollout_vllm.engine import InFlight
from rollout_vllm.errors import (
    GenerationError,
    SamplerDiedError,
    StartError,
    WeightUpdateError,
)
from rollout_vllm.headers import TensorHeader
from rollout_vllm.lora import Lora
from rollout_vllm.options import RequestOptions, TokenDelta
from rollout_vllm.sleep import Part
from rollout_vllm.vllm_prompts import Prompt
from rollout_vllm.vllm_requests import Requests, engine_params

# VLLMError is the base of all from 0.28 on; earlier errors of a request derive from ValueError
_REQUEST_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    EngineGenerateError,
    getattr(exceptions, "VLLMError", EngineGenerateError),
)
_START_ERRORS: tuple[type[Exception], ...] = (RuntimeError, TypeError, OSError, *_REQUEST_ERRORS)

_ANSWER_TIMEOUT_S = 10.0  # for what takes milliseconds


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except EngineDeadError as error:
        raise SamplerDiedError(
            "vLLM's engine process died; its own message stands above in the log"
        ) from error


@contextmanager
def _translated_request() -> Iterator[None]:
    try:
        yield
    except EngineDeadError:
        raise
    except _REQUEST_ERRORS as error:
        cause = error.__cause__ or error
        raise GenerationError(f"vLLM failed on a request: {cause}") from error


@final
class VllmEngine:
    """An `rollout_vllm.engine.Engine` made of vLLM's `AsyncLLM`."""

    def __init__(self, engine: AsyncLLM, *, routed: bool, adapted: bool, serves: bool) -> None:
        self._engine = engine
        self._adapted = adapted
        self._serves = serves
        self._requests = Requests(engine, routed=routed, adapted=adapted)

    @classmethod
    def start(cls, arguments: Mapping[str, object], *, device: Device, serves: bool) -> Self:
        """Start the engine's process and wait until it is ready.

        Raises:
            StartError: if it does not come up, or would run on another device.
        """
        found = getattr(current_platform, "device_name", None)
        if found != device:
            message = (
                f"VllmConfig.device is {device!r}, and the installed vLLM "
                f"({current_platform.__class__.__module__}) finds {found!r} here; "
                "install rollout-vllm with the extra of the device (cpu, cuda, ascend), on a "
                "machine that has it"
            )
            raise StartError(message)
        try:
            engine_args = AsyncEngineArgs(**arguments)  # type: ignore[arg-type]
            # the limits that vLLM takes by default depend on this: those of vllm.LLM, which are
            # the largest (EngineArgs.get_batch_defaults, 0.23 to 0.32)
            context = UsageContext.LLM_CLASS
            engine = AsyncLLM.from_engine_args(engine_args, usage_context=context)
        except _START_ERRORS as error:
            raise StartError(f"vLLM did not start: {error}") from error
        return cls(
            engine,
            routed=bool(arguments.get("enable_return_routed_experts")),
            adapted=bool(arguments.get("enable_lora")),
            serves=serves,
        )

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
        options: RequestOptions,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        """Draw completions; cancelling it frees their places."""
        # greedy samples of one prompt are all the same
        greedy = params.temperature == 0.0
        sampling = [
            engine_params(params, options, sample=sample, stream=False)
            for sample in range(1 if greedy else num_samples)
        ]
        with _translated(), _translated_request():
            completions = await self._requests.draw(
                request_id, Prompt(prompt_ids, images), sampling
            )
        return completions * num_samples if greedy else completions

    async def stream(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        params: SamplingParams,
        options: RequestOptions,
        images: Sequence[PromptImage] = (),
    ) -> AsyncGenerator[TokenDelta, None]:
        """Draw one completion and yield its tokens as they come; closing it frees its place."""
        sampling = engine_params(params, options, sample=0, stream=True)
        prompt = Prompt(prompt_ids, images)
        async with aclosing(self._requests.stream(request_id, prompt, sampling)) as deltas:
            with _translated(), _translated_request():
                async for delta in deltas:
                    yield delta

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; `generate` returns what they have, with the reason `abort`."""
        with _translated():
            await self._requests.abort(request_ids)

    @property
    def served(self) -> AsyncLLM:
        """What vLLM's own server code reads of the engine, which is not to be changed there."""
        return self._engine

    async def pass_on(
        self,
        request_id: str,
        prompt: EngineInput,
        params: EngineSamplingParams,
        options: Mapping[str, object],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a request of vLLM's own server; errors but the engine's death stay vLLM's."""
        outputs = self._requests.pass_on(request_id, prompt, params, options)
        async with aclosing(outputs):
            with _translated():
                async for output in outputs:
                    yield output

    @staticmethod
    def check_tool_parser(name: str | None) -> None:
        """Refuse a parser of tool calls that vLLM does not have.

        Raises:
            ValueError: names those that it has.
        """
        known = ToolParserManager.list_registered()
        if name not in (None, *known):
            raise ValueError(
                f"ServerConfig: expected tool_call_parser to be one of {sorted(known)}, got "
                f"{name!r}"
            )

    def check_end_of_sequence(self) -> None:
        """Refuse a tokenizer that would end completions where the model itself does not.

        Raises:
            ValueError: names both.
        """
        found = self._engine.renderer.get_eos_token_id()
        known = self._engine.model_config.try_get_generation_config().get("eos_token_id")
        ends = known if isinstance(known, list) else [known]
        if found is not None and found not in ends:
            message = (
                f"VllmConfig: the tokenizer's end of sequence is token {found}, and that of "
                f"the model (generation_config.json, config.json) {known}; with a server or images "
                "vLLM ends every completion at both; make the files agree"
            )
            raise ValueError(message)

    async def prepare(self, *, lora: Lora | None, tensors: Mapping[str, TensorHeader]) -> None:
        """Set up the transfer that `update_weights` uses, and what vLLM has left undone.

        Args:
            lora: the adapters that updates are; None: they are whole weights.
            tensors: names and shapes of an update.

        Raises:
            StartError: if a worker cannot do what was configured.
        """
        with _translated():
            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest())
            try:
                await self._engine.collective_rpc("rollout_prepare")
                if lora is not None:
                    shapes = {name: list(header.shape) for name, header in tensors.items()}
                    await self._engine.collective_rpc(
                        "rollout_prepare_adapter", args=(shapes, lora.rank, lora.scaling)
                    )
            except EngineDeadError:
                raise
            except Exception as error:
                # the border of the engine's process, as below
                raise StartError(f"vLLM started, and cannot be used: {error}") from error

    async def hold(self, in_flight: InFlight) -> None:
        """Let no request move, and clear all caches."""
        with _translated():
            # without clear_cache, later prompts would reuse the old weights' prefixes, and
            # running requests their old keys and values
            if in_flight == "abort" and self._serves:
                # vLLM would end the server's requests too, which nobody continues
                await self._engine.pause_generation(mode="keep", clear_cache=True)
                await self._requests.abort_own()
            else:
                await self._engine.pause_generation(mode=in_flight, clear_cache=True)

    async def update_weights(
        self, instructions: Mapping[str, object], *, version: PolicyVersion
    ) -> None:
        """Load what was published, and name the version."""
        info = {"instructions": dict(instructions), "tied": self.tied}
        await self._meet(info["instructions"])
        await self._whole(self._take(info, version), f"the update to version {version}")

    async def _take(self, info: Mapping[str, object], version: PolicyVersion) -> None:
        if self._adapted:
            await self._engine.collective_rpc("rollout_take_adapter", args=(dict(info),))
        else:
            await self._engine.start_weight_update()
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info=dict(info)))
            await self._engine.finish_weight_update()
        await self.set_version(version)

    async def _meet(self, instructions: object) -> None:
        with _translated():
            try:
                await self._engine.collective_rpc("rollout_meet", args=(instructions,))
            except EngineDeadError:
                raise
            except Exception as error:
                # the border of the engine's process, as above; a worker may have got through
                reason = f"nothing was loaded, the engine did not reach the sender: {error}"
                await self._survived(reason, error, method="rollout_part", args=(reason,))
                raise ConnectionError(reason) from error

    async def _whole(self, change: Awaitable[object], what: str) -> None:
        """Let the engine change; one that stops half-way is of no use any more.

        Raises:
            WeightUpdateError: if it broke off.
            SamplerDiedError: if the engine's process, or one of its workers, died.
        """
        with _translated():
            try:
                await change
            except EngineDeadError:
                raise
            except Exception as error:
                # the border of the engine's process: vLLM raises a bare Exception for whatever went
                # wrong over there, and the sampler closes itself on this error
                reason = f"{what} broke off in the engine: {error}"
                # vLLM reads no answer behind the first worker that failed: each of those that are
                # left may be a failure too, and is what the next question gets
                attempts = self._engine.vllm_config.parallel_config.world_size
                await self._survived(reason, error, attempts=attempts)
                raise WeightUpdateError(reason) from error

    async def _survived(
        self,
        reason: str,
        error: Exception,
        *,
        method: str = "rollout_environment",
        args: tuple[object, ...] = (),
        attempts: int = 1,
    ) -> None:
        """See that the engine still answers after it failed.

        When a worker dies, vLLM fails what waits for it like any call, before it marks the engine
        as dead.

        Raises:
            SamplerDiedError: if it does not.
        """
        silent = f"nothing within {_ANSWER_TIMEOUT_S:g} s"
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                for _ in range(attempts):
                    try:
                        await self._engine.collective_rpc(method, args=args)
                    except Exception as failure:  # noqa: BLE001  (the border, as above)
                        silent = str(failure)
                    else:
                        return
        raise SamplerDiedError(f"{reason}; asked once more, vLLM's engine: {silent}") from error

    async def go_on(self) -> None:
        """Let requests move again."""
        with _translated():
            await self._engine.resume_generation()

    async def sleep(self, *, keep_weights: bool) -> None:
        """Give up the memory of weights and caches. Only while requests are held."""
        # level 1 keeps the weights on the host, level 2 gives them up
        await self._whole(
            self._engine.sleep(level=1 if keep_weights else 2, mode="keep"), "falling asleep"
        )

    async def wake(self, parts: Sequence[Part]) -> None:
        """Take the memory of these parts back; once all are awake, requests go on."""
        await self._whole(self._engine.wake_up(list(parts)), f"waking {', '.join(parts)}")

    async def used_memory(self) -> int:
        """Bytes in use on the engine's devices together, by whomever."""
        with _translated():
            return sum(await self._engine.collective_rpc("rollout_used_memory"))

    async def set_version(self, version: PolicyVersion) -> None:
        """Name the version of the present weights; call it while no request moves."""
        with _translated():
            await self._requests.mark(version)
            # from 0.28 on
            if hasattr(self._engine, "update_weight_version"):
                await self._engine.update_weight_version(str(version))

    async def spread_seeds(self) -> None:
        """Give each data-parallel engine a random stream of its own."""
        with _translated():
            await self._engine.collective_rpc("rollout_seed")

    async def settings(self) -> Mapping[str, Mapping[str, object]]:
        """Plain values of each worker's resolved config, by part; further workers as part@rank."""
        with _translated():
            reports = await self._engine.collective_rpc("rollout_settings")
        parts = {
            part if rank == 0 else f"{part}@{rank}": dict(values)
            for rank, report in enumerate(reports)
            for part, values in report.items()
        }
        parts["client"] = {"num_engines": len(self._engine.engine_core.engine_ranks_managed)}
        return parts

    async def environment(self) -> Mapping[str, str]:
        """Variables that vLLM and OpenMP read, as the engine's process found them."""
        with _translated():
            (found, *_) = await self._engine.collective_rpc("rollout_environment")
        return {str(name): str(value) for name, value in found.items()}

    def shutdown(self) -> None:
        """End the engine's process; may be called twice, from the loop that used it."""
        self._engine.shutdown()
        # vLLM closes its sockets, and leaves the context and its threads to the garbage collector
        self._engine.engine_core.resources.ctx.destroy(linger=0)
