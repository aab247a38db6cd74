"""The Ray actors that sample. Wiring, no algorithm."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast, final

from placement import Placement
from trainer import CALL_TIMEOUT_S, READY_TIMEOUT_S
from turns import Turns

from async_policy import Actor, ActorMethodError, Cluster
from rl_contracts import Completion, PolicyVersion, Sampler, SamplingParams
from rl_contracts.images import PromptImage
from rollout_vllm import VllmConfig
from rollout_vllm.remote_replica import RemoteReplica
from rollout_vllm.replica import ReplicaSetConfig, replica_config
from rollout_vllm.replicas import ReplicaSet
from rollout_vllm.sampler_host import SamplerHost
from rollout_vllm.weight_source import WeightSource

MAX_CALLS = 100_000
"""Requests that a sampler's process holds at a time: more than any step has, since a question after
its health would wait behind them."""


class Samplers(Sampler, Protocol):
    """What a loop needs of one sampler or several: a `ReplicaSet` fits."""

    async def load_from(self, source: WeightSource) -> None:
        """Take the weights that the source has; after it no token is drawn from older ones."""


@final
class SamplersInTurn:
    """Samplers that share their devices with the trainer, as a loop sees them."""

    def __init__(self, samplers: Samplers, turns: Turns) -> None:
        self._samplers = samplers
        self._turns = turns

    @property
    def policy_version(self) -> PolicyVersion:
        """Version of the weights that the next token will be drawn from."""
        return self._samplers.policy_version

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        params: SamplingParams,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        """Draw completions once the devices are the samplers'."""
        async with self._turns.sampling():
            return await self._samplers.sample(
                prompt_ids, num_samples=num_samples, params=params, images=images
            )

    async def load_from(self, source: WeightSource) -> None:
        """Take weights with both sides' on the devices, which are the samplers' afterwards."""
        await self._turns.publish(lambda: self._samplers.load_from(source))


@final
class ActorRemote:
    """A sampler's process, as rollout-vllm reaches it; see `rollout_vllm.remote_replica`."""

    def __init__(self, actor: Actor[SamplerHost]) -> None:
        self._actor = actor

    def submit(self, method: str, *args: object, **kwargs: object) -> Awaitable[object]:
        """Call a method of the host."""
        called: Callable[..., Awaitable[object]] = getattr(SamplerHost, method)
        return asyncio.ensure_future(self._actor.call(called, *args, **kwargs))

    def cancel(self, call: Awaitable[object]) -> None:
        """Cancel such a call, over there too."""
        cast("asyncio.Future[object]", call).cancel()

    def raised(self, error: Exception) -> Exception | None:
        """What the method itself raised, if it did."""
        cause = getattr(error.__cause__, "cause", None)  # of ray's error, behind the actor's
        return (
            cause if isinstance(error, ActorMethodError) and isinstance(cause, Exception) else None
        )

    def end(self) -> None:
        """End the process."""
        self._actor.stop()


async def start_samplers(
    cluster: Cluster, config: VllmConfig, *, placement: Placement
) -> tuple[ReplicaSet, list[Actor[SamplerHost]]]:
    """Samplers with the weights of the model folder, each in a process of its own.

    One that dies is replaced by another of the same name, which is sent the trainer's weights
    before it serves; its requests are drawn again by those that are left.
    """
    actors: dict[int, Actor[SamplerHost]] = {}
    count = len(placement.samplers)

    async def start(number: int) -> RemoteReplica:
        name = "sampler" if count == 1 else f"sampler {number}"
        if number in actors:
            actors[number].stop()
        actor = cluster.actor(
            name,
            environment=placement.environment(placement.samplers[number]),
            call_timeout_s=CALL_TIMEOUT_S,
            max_calls=MAX_CALLS,
        ).start(SamplerHost, replica_config(config, number), policy_version=PolicyVersion(0))
        actors[number] = actor
        return await RemoteReplica.start(ActorRemote(actor), name=name)

    samplers = await ReplicaSet.start(
        start,
        ReplicaSetConfig(num_replicas=count, start_timeout_s=READY_TIMEOUT_S),
        policy_version=PolicyVersion(0),
        dtype=config.dtype,
    )
    return samplers, [actors[number] for number in range(count)]
