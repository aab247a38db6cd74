"""One request to vLLM's `AsyncLLM` and back: parameters in, completions and deltas out.

Each sample is a request of its own: vLLM fans a group out the same way, and it lets every sample
be streamed, counted and aborted. Only `vllm_engine` imports this module.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import final

from vllm import SamplingParams as EngineSamplingParams
from vllm.inputs import EngineInput
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from rl_contracts.rollout import Completion, FinishReason, PolicyVersion, SamplingParams
from rollout_vllm.errors import GenerationError
from rollout_vllm.lora import ADAPTER_ID
from rollout_vllm.options import RequestOptions, TokenDelta
from rollout_vllm.routing import RoutedCompletion
from rollout_vllm.token_versions import TokenVersions
from rollout_vllm.vllm_prompts import Prompt

_FINISH_REASONS: Mapping[str | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
}

# The same for all requests and updates, so that those that run go on with the next adapter. Nothing
# is read from the path: should the engine ever not know the number, it fails instead.
_ADAPTER = LoRARequest("policy", ADAPTER_ID, "/rollout-vllm takes adapters from memory alone")


def engine_params(
    params: SamplingParams, options: RequestOptions, *, sample: int, stream: bool
) -> EngineSamplingParams:
    """The parameters that vLLM gets for one sample of a group."""
    return EngineSamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=options.top_k or 0,
        max_tokens=params.max_new_tokens,
        min_tokens=options.min_new_tokens,
        stop_token_ids=list(params.stop_token_ids),
        seed=None if params.seed is None else params.seed + sample,
        logprobs=0,  # the sampled token's own
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # made for this request alone
    )


@final
class Requests:
    """The running requests of one engine."""

    def __init__(self, engine: AsyncLLM, *, routed: bool, adapted: bool) -> None:
        self._engine = engine
        self._routed = routed
        self._adapter = _ADAPTER if adapted else None
        self._versions = TokenVersions()
        self._passed_on: set[str] = set()
        # request -> its samples, under the names that vLLM was given
        self._samples: dict[str, list[str]] = {}

    async def draw(
        self,
        request_id: str,
        prompt: Prompt,
        params: Sequence[EngineSamplingParams],
    ) -> list[Completion]:
        """One completion for each entry of `params`; cancelling it frees their places."""
        collectors: list[RequestOutputCollector] = []
        samples = [f"{request_id}-{index}" for index in range(len(params))]
        self._samples[request_id] = samples
        try:
            for sample, sampling in zip(samples, params, strict=True):
                collectors.append(await self._add(sample, prompt, sampling))
            return [
                self._completion(sample, await _next(collector), prompt=prompt)
                for sample, collector in zip(samples, collectors, strict=True)
            ]
        except BaseException:
            await self._abandon(collectors)
            raise
        finally:
            self._forget(request_id)

    async def stream(
        self, request_id: str, prompt: Prompt, params: EngineSamplingParams
    ) -> AsyncGenerator[TokenDelta, None]:
        """The tokens of one completion as they are drawn; closing it frees its place."""
        sample = f"{request_id}-0"
        self._samples[request_id] = [sample]
        collectors: list[RequestOutputCollector] = []
        num_tokens = 0
        try:
            collectors.append(await self._add(sample, prompt, params))
            finished = False
            while not finished:
                output = await _next(collectors[0])
                prompt.check_read(output.prompt_token_ids)
                finished = output.finished
                (part,) = output.outputs
                token_ids, logprobs = _tokens(part)
                versions = self._versions.take(sample, num_tokens + len(token_ids))
                delta = TokenDelta(
                    token_ids=token_ids,
                    rollout_logprobs=logprobs,
                    policy_versions=versions[num_tokens:],
                    finish_reason=_reason(part) if finished else None,
                )
                num_tokens += len(token_ids)
                yield delta
        except BaseException:
            await self._abandon(collectors)
            raise
        finally:
            self._forget(request_id)

    async def pass_on(
        self,
        request_id: str,
        prompt: EngineInput,
        params: EngineSamplingParams,
        options: Mapping[str, object],
    ) -> AsyncGenerator[RequestOutput, None]:
        """A request of vLLM's own server, as it is; closing it frees its places."""
        name = f"{request_id}-served"
        self._samples[request_id] = [name]
        self._passed_on.add(request_id)
        # the options are named by the server code of the same vLLM, which knows no adapter
        given = {**options, "lora_request": self._adapter}
        outputs = self._engine.generate(prompt, params, name, **given)  # type: ignore[arg-type]
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            self._passed_on.discard(request_id)
            self._forget(request_id)

    async def abort_own(self) -> None:
        """End all requests but the server's; call it while the engine holds all requests.

        They return everything that they have drawn.
        """
        await self._all_received()
        await self.abort([name for name in self._samples if name not in self._passed_on])

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; they return what they have. Unknown ones have ended already."""
        samples = [name for request in request_ids for name in self._samples.get(request, ())]
        await self._engine.abort(samples)

    async def mark(self, version: PolicyVersion) -> None:
        """Tokens from now on are of this version; call it while the engine holds all requests."""
        await self._all_received()
        processor = self._engine.output_processor
        num_tokens: dict[str, int] = {}
        for state in processor.request_states.values():
            if state.detokenizer is not None:
                num_tokens[state.external_req_id] = state.detokenizer.num_output_tokens()
        self._versions.mark(num_tokens, version)

    async def _all_received(self) -> None:
        """Wait until everything that the engine sent before has been counted."""
        client = self._engine.engine_core
        assert isinstance(client, AsyncMPClient)  # noqa: S101  (what AsyncLLM is made of, 0.23 to 0.32)
        # Outputs and answers come over one socket in order, so all outputs lie in this queue by
        # now. Whoever takes the empty one has processed those before it.
        client.outputs_queue.put_nowait(EngineCoreOutputs())
        while not client.outputs_queue.empty():
            if self._engine.errored:
                raise EngineDeadError
            await asyncio.sleep(0)

    async def _add(
        self, sample: str, prompt: Prompt, params: EngineSamplingParams
    ) -> RequestOutputCollector:
        self._versions.begin(sample)
        return await self._engine.add_request(
            sample, prompt.for_engine(), params, lora_request=self._adapter
        )

    async def _abandon(self, collectors: Sequence[RequestOutputCollector]) -> None:
        if not self._engine.errored:
            await self._engine.abort(
                [collector.request_id for collector in collectors], internal=True
            )

    def _forget(self, request_id: str) -> None:
        for sample in self._samples.pop(request_id):
            self._versions.forget(sample)

    def _completion(self, sample: str, output: RequestOutput, *, prompt: Prompt) -> Completion:
        prompt.check_read(output.prompt_token_ids)
        (part,) = output.outputs
        token_ids, logprobs = _tokens(part)
        # vLLM says it itself from 0.32 on
        spans = getattr(part, "weight_versions", None)
        if spans is None:
            versions = self._versions.take(sample, len(token_ids))
        else:
            versions = tuple(
                PolicyVersion(int(span.version))
                for span in spans
                for _ in range(span.start, span.end)
            )
        completion = Completion(
            token_ids=token_ids,
            rollout_logprobs=logprobs,
            policy_versions=versions,
            finish_reason=_reason(part),
        )
        if self._routed and token_ids:
            return _with_experts(completion, part, num_prompt=len(prompt.token_ids))
        return completion


def _with_experts(
    completion: Completion, output: CompletionOutput, *, num_prompt: int
) -> RoutedCompletion:
    experts = output.routed_experts
    expected = num_prompt + len(completion.token_ids) - 1
    if experts is None or len(experts) != expected:
        found = None if experts is None else len(experts)
        message = (
            f"vLLM returned the experts of {found} tokens, expected those of {expected}: "
            f"{num_prompt} of the prompt and all but the last of {len(completion.token_ids)}"
        )
        raise GenerationError(message)
    return RoutedCompletion(
        token_ids=completion.token_ids,
        rollout_logprobs=completion.rollout_logprobs,
        policy_versions=completion.policy_versions,
        finish_reason=completion.finish_reason,
        routed_experts=experts,
    )


async def _next(collector: RequestOutputCollector) -> RequestOutput:
    output = collector.get_nowait() or await collector.get()
    assert isinstance(output, RequestOutput)  # noqa: S101  (nothing else was asked for)
    return output


def _reason(output: CompletionOutput) -> FinishReason:
    reason = _FINISH_REASONS.get(output.finish_reason)
    if reason is None:
        raise GenerationError(f"vLLM ended a request for the reason {output.finish_reason!r}")
    return reason


def _tokens(output: CompletionOutput) -> tuple[tuple[int, ...], tuple[float, ...]]:
    token_ids = tuple(output.token_ids)
    logprobs = output.logprobs
    if token_ids and not isinstance(logprobs, FlatLogprobs):
        raise GenerationError(f"vLLM returned no logprobs for {len(token_ids)} tokens")
    values = tuple(logprobs.logprobs) if isinstance(logprobs, FlatLogprobs) else ()
    if len(values) != len(token_ids):
        message = f"vLLM returned {len(values)} logprobs for {len(token_ids)} tokens"
        raise GenerationError(message)
    if not all(map(math.isfinite, values)):
        place = next(i for i, value in enumerate(values) if not math.isfinite(value))
        message = (
            f"vLLM gave token {place} of {len(values)} the logprob {values[place]}; the weights "
            "it was last given are probably not finite"
        )
        raise GenerationError(message)
    return token_ids, values
