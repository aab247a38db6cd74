"""What vLLM's HTTP server gets of the engine: what sampling needs, and nothing else.

Stands in for vLLM's `EngineClient` where its server code asks for one. An endpoint that would
update weights, sleep or call into the engine's process finds no method here to do it with.
"""

import copy
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import cast, final

from fastapi import HTTPException
from vllm.config import ModelConfig
from vllm.inputs import EngineInput
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams as EngineSamplingParams

from rollout_vllm.admission import Admission
from rollout_vllm.errors import SamplerClosedError
from rollout_vllm.sleep import SamplerAsleepError
from rollout_vllm.vllm_engine import VllmEngine


@final
class ServedEngine:
    """Lets requests of the server through to the engine, as the sampler's own."""

    errored = False
    """Whether the engine died is said by `generate`, once and in our words."""

    def __init__(self, engine: VllmEngine, admission: Admission) -> None:
        self._engine = engine
        self._admission = admission
        served = engine.served
        self.vllm_config = served.vllm_config
        self.model_config = _neutral_defaults(served.model_config)
        self.renderer = served.renderer
        self.input_processor = served.input_processor

    def check_admission(self, num_sequences: int = 1, request_id: str | None = None) -> None:
        """Any number of requests may wait."""

    async def check_health(self) -> None:
        """An engine that died is found out by whoever asks it for tokens."""

    async def is_tracing_enabled(self) -> bool:
        """Nothing is reported to anybody."""
        return False

    async def generate(
        self,
        prompt: EngineInput,
        sampling_params: EngineSamplingParams,
        request_id: str,
        **options: object,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Draw completions for one request of the server.

        The request gets a name of ours: the server's comes from the client.

        Raises:
            HTTPException: 400 for a token id that the model does not know, which vLLM itself
                refuses from 0.32 on; 503 if the sampler is or gets closed, or sleeps.
        """
        del request_id
        self._check_ids(prompt)
        try:
            self._admission.check()
            with self._admission.request() as name:
                outputs = self._engine.pass_on(name, prompt, sampling_params, options)
                async with aclosing(outputs):
                    async for output in outputs:
                        # aborted because the sampler closed: not an answer
                        self._admission.check_open()
                        yield output
        except (SamplerClosedError, SamplerAsleepError) as error:
            raise HTTPException(status_code=503, detail=str(error)) from error

    def _check_ids(self, prompt: EngineInput) -> None:
        known = self._engine.vocab_size
        token_ids = cast("Sequence[int]", prompt.get("prompt_token_ids") or ())
        for place, token in enumerate(token_ids):
            if not 0 <= token < known:
                text = (
                    f"prompt token {place} is {token}, which is out of vocabulary: the model knows "
                    f"the token ids 0 to {known - 1}"
                )
                raise HTTPException(status_code=400, detail=text)


def _neutral_defaults(model_config: ModelConfig) -> ModelConfig:
    """The same model, for which a parameter that a request leaves out means "no change".

    Otherwise the server would take temperature, top_p and top_k from the model's
    generation_config.json, and the policy would be sampled from another distribution than its own.
    """
    neutral = copy.copy(model_config)
    neutral.generation_config = "vllm"
    return neutral
