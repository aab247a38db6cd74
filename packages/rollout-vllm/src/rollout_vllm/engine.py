"""The seam to vLLM: what the sampler asks of an engine, in our own types."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams


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
    ) -> list[Completion]:
        """Draw completions; cancelling it frees their places.

        Raises:
            GenerationError: if the engine refuses the request or fails on it.
        """

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; `generate` returns what they have, with the reason `abort`."""

    async def update_weights(
        self, paths: Sequence[Path], *, version: PolicyVersion, tied: bool
    ) -> None:
        """Hold all requests, clear all caches, load the files, name the version, go on.

        Raises:
            WeightUpdateError: if any of it fails; the engine's weights are then undefined.
        """

    async def settings(self) -> Mapping[str, Mapping[str, object]]:
        """Plain values of the engine's resolved config, by part, and of its process."""

    async def environment(self) -> Mapping[str, str]:
        """Variables that vLLM and OpenMP read, as the engine's process found them."""

    def shutdown(self) -> None:
        """End the engine's process; may be called twice."""
