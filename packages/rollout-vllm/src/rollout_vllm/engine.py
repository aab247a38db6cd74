"""The seam to vLLM: what the sampler asks of an engine, in our own types."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Literal, Protocol

from rl_contracts.images import PromptImage
from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm.options import RequestOptions, TokenDelta
from rollout_vllm.sleep import Part

InFlight = Literal["keep", "abort", "wait"]
"""What becomes of running requests when new weights come; see `rollout_vllm.in_flight`."""


class Engine(Protocol):
    """An engine that runs. Every method may raise `SamplerDiedError`."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt and completion together, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model knows."""

    @property
    def tied(self) -> bool:
        """Whether the head shares the embedding's weight."""

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
        """Draw completions; cancelling it frees their places.

        Raises:
            GenerationError: if the engine refuses the request or fails on it.
        """

    def stream(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        params: SamplingParams,
        options: RequestOptions,
        images: Sequence[PromptImage] = (),
    ) -> AsyncGenerator[TokenDelta, None]:
        """Draw one completion and yield its tokens as they come; closing it frees its place.

        Raises:
            GenerationError: if the engine refuses the request or fails on it.
        """

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; `generate` returns what they have, with the reason `abort`.

        Those that are not known have ended.
        """

    async def hold(self, in_flight: InFlight) -> None:
        """Let no request move, and clear all caches, until `go_on`.

        Running requests are kept, ended with the reason `abort`, or waited for.
        """

    async def update_weights(
        self, instructions: Mapping[str, object], *, version: PolicyVersion
    ) -> None:
        """Load what a `rollout_vllm.publication.Publication` says, and name the version.

        Only while requests are held.

        Raises:
            ConnectionError: if a sender is not reached; no weight was touched.
            WeightUpdateError: if anything later fails; the engine's weights are then undefined.
        """

    async def go_on(self) -> None:
        """Let requests move again."""

    async def sleep(self, *, keep_weights: bool) -> None:
        """Give up the memory of weights and caches. Only while requests are held."""

    async def wake(self, parts: Sequence[Part]) -> None:
        """Take the memory of these parts back; once all are awake, requests go on."""

    async def used_memory(self) -> int:
        """Bytes in use on the engine's devices together, by whomever."""

    async def settings(self) -> Mapping[str, Mapping[str, object]]:
        """Plain values of the engine's resolved config, by part, and of its process."""

    async def environment(self) -> Mapping[str, str]:
        """Variables that vLLM and OpenMP read, as the engine's process found them."""

    def shutdown(self) -> None:
        """End the engine's process; may be called twice."""
