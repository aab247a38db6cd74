"""One of several samplers, and how many there shall be; see `rollout_vllm.replicas`."""

import zlib
from collections.abc import Sequence
from typing import Protocol

import attrs

from rl_contracts.images import PromptImage
from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm.config import VllmConfig
from rollout_vllm.engine import InFlight
from rollout_vllm.errors import RolloutError
from rollout_vllm.publication import Publication
from rollout_vllm.replica_choice import MOST_ABOVE_MEAN
from rollout_vllm.sleep import MemoryChange, Part


class ReplicaLostError(RolloutError):
    """A replica's process is gone or does not answer; what a handle of one raises then."""


class Replica(Protocol):
    """One sampler; `VllmSampler` is one.

    Every method but `close` raises `ReplicaLostError` or `SamplerClosedError` if it is gone.
    """

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        params: SamplingParams,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        """As `VllmSampler.sample`."""

    async def check_published(self, published: Publication) -> None:
        """As `VllmSampler.check_published`."""

    async def load_published(
        self, published: Publication, *, keep: bool, in_flight: InFlight
    ) -> None:
        """As `VllmSampler.load_published`."""

    async def sleep(self, *, keep_weights: bool) -> MemoryChange:
        """As `VllmSampler.sleep`."""

    async def wake(self, parts: Sequence[Part]) -> MemoryChange:
        """As `VllmSampler.wake`."""

    async def ping(self) -> PolicyVersion:
        """The version of its weights, if its engine is alive."""

    async def close(self) -> None:
        """End it, in whatever state it is."""


@attrs.frozen(kw_only=True)
class ReplicaSetConfig:
    """How many replicas, and when one counts as dead."""

    num_replicas: int = attrs.field(validator=attrs.validators.ge(1))
    """Samplers that serve together."""

    health_interval_s: float = attrs.field(default=5.0, validator=attrs.validators.gt(0.0))
    """Seconds between two questions whether a replica is alive. Default: small beside the 20 to
    60 s that starting another one takes."""

    health_timeout_s: float = attrs.field(default=60.0, validator=attrs.validators.gt(0.0))
    """Longest wait for the answer, in seconds. Default: longer than a weight update holds an
    engine."""

    start_timeout_s: float = attrs.field(default=900.0, validator=attrs.validators.gt(0.0))
    """Longest start of a replica, in seconds. Default: compiling a large model fits in."""

    update_timeout_s: float = attrs.field(default=900.0, validator=attrs.validators.gt(0.0))
    """Longest weight update of a replica, in seconds. Default: above the 600 s that a sampler
    gives itself (`VllmConfig.weight_update_timeout_s`)."""

    max_failed_starts: int = attrs.field(default=3, validator=attrs.validators.ge(1))
    """Failed starts in a row of one replica, after which the set gives up."""

    most_above_mean: float = attrs.field(
        default=MOST_ABOVE_MEAN, validator=attrs.validators.gt(1.0)
    )
    """Largest share of one replica's running samples, in means. Default: the prefix cache is used
    where it costs a quarter more load at most."""


def replica_config(config: VllmConfig, number: int) -> VllmConfig:
    """The config of replica `number`: with a seed of its own, the same after every restart.

    Replicas with one seed draw the same tokens for the same prompt (verl issue 5179).
    """
    return attrs.evolve(config, seed=zlib.crc32(f"{config.seed}/{number}".encode()))
