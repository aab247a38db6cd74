"""A sampler for a process of its own: a class that an actor system builds, and then calls.

::

    driver                                      actor's process           engine's process
    a handle, a `rollout_vllm.replicas.Replica` ── SamplerHost ── VllmSampler ── vLLM

Ray's actors are built without `await`, so the sampler starts by a call. Everything that goes in and
out is small and picklable: configs, completions, publications.
"""

import os
from collections.abc import Sequence
from typing import final

from rl_contracts.images import PromptImage
from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm.config import VllmConfig
from rollout_vllm.engine import InFlight
from rollout_vllm.errors import SamplerClosedError
from rollout_vllm.publication import Publication
from rollout_vllm.sampler import VllmSampler
from rollout_vllm.sleep import MemoryChange, Part


@final
class SamplerHost:
    """Holds one `VllmSampler`; methods as there.

    Args:
        config: how to sample.
        policy_version: optimizer steps behind the weights in the model's folder.
    """

    def __init__(self, config: VllmConfig, *, policy_version: PolicyVersion) -> None:
        self._config = config
        self._first_version = policy_version
        self._sampler: VllmSampler | None = None

    async def start(self) -> int:
        """Start the sampler, and return this process's id.

        Raises:
            StartError: as `VllmSampler.start`.
            ValueError: as `VllmSampler.start`.
        """
        self._sampler = await VllmSampler.start(self._config, policy_version=self._first_version)
        return os.getpid()

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        params: SamplingParams,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        """As `VllmSampler.sample`."""
        return await self._started().sample(
            prompt_ids, num_samples=num_samples, params=params, images=images
        )

    async def check_published(self, published: Publication) -> None:
        """As `VllmSampler.check_published`."""
        await self._started().check_published(published)

    async def load_published(
        self, published: Publication, *, keep: bool, in_flight: InFlight
    ) -> None:
        """As `VllmSampler.load_published`."""
        await self._started().load_published(published, keep=keep, in_flight=in_flight)

    async def sleep(self, *, keep_weights: bool) -> MemoryChange:
        """As `VllmSampler.sleep`; running requests are kept."""
        return await self._started().sleep(keep_weights=keep_weights)

    async def wake(self, parts: Sequence[Part]) -> MemoryChange:
        """As `VllmSampler.wake`."""
        return await self._started().wake(parts)

    async def ping(self) -> PolicyVersion:
        """As `VllmSampler.ping`."""
        return await self._started().ping()

    async def server_url(self) -> str:
        """As `VllmSampler.server_url`."""
        return self._started().server_url

    async def environment(self) -> dict[str, str]:
        """The variables that this process sees, secrets among them: filter what is kept."""
        return dict(os.environ)

    async def close(self) -> None:
        """As `VllmSampler.close`."""
        if self._sampler is not None:
            await self._sampler.close()

    def _started(self) -> VllmSampler:
        if self._sampler is None:
            raise SamplerClosedError("the sampler was not started; call SamplerHost.start first")
        return self._sampler
