"""The Ray actors of an example: trainer ranks and samplers. Wiring, no algorithm."""

import asyncio
import dataclasses
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast, final

from torch import Tensor

from async_policy import Actor, ActorLostError, ActorMethodError, Cluster
from device_env import snapshot
from rl_contracts import PolicyVersion, Sampler
from rl_contracts.train import (
    Checkpointable,
    LossFn,
    PackedBatch,
    PretrainedExporter,
    StepResult,
    TrainEngine,
)
from rollout_vllm import Dtype, PublishedWeights, VllmConfig, publish_weights
from rollout_vllm.remote_replica import RemoteReplica
from rollout_vllm.replica import ReplicaSetConfig, replica_config
from rollout_vllm.replicas import ReplicaSet
from rollout_vllm.sampler_host import SamplerHost


class Engine(TrainEngine, Checkpointable, PretrainedExporter, Protocol):
    """What the trainer needs of an engine: engine-fsdp and engine-veomni both fit."""


class Scorer(Protocol):
    """A frozen policy; `FsdpScorer` and `VeomniScorer` both fit."""

    def logprobs(self, micro_batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Log-probabilities of the given tokens, one tensor per micro-batch."""


R = TypeVar("R")

LAST_WORDS_S = 10.0
"""How long ranks have to say what happened to them, once one has failed."""

MakeEngine = Callable[[int, int, str], Engine]
"""(rank, number of ranks, where they meet) to an engine; runs in the rank's own process."""

MakeReference = Callable[[], Scorer]
"""Makes the reference policy of a rank, in the rank's process, after its engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """One training step as the loop sees it."""

    step: StepResult
    metrics: dict[str, float]
    seconds: float


@final
class TrainerRank:
    """One rank of the trainer; Ray runs it in a process of its own."""

    def __init__(
        self,
        make_engine: MakeEngine,
        make_reference: MakeReference | None,
        *,
        rank: int,
        num_ranks: int,
        meeting_point: str,
    ) -> None:
        self._rank = rank
        self._engine = make_engine(rank, num_ranks, meeting_point)
        self._reference = None if make_reference is None else make_reference()

    def environment(self) -> dict[str, str]:
        """The variables that this process sees, for the run folder."""
        return snapshot(os.environ)

    def train(self, micro_batches: list[PackedBatch], loss_fn: LossFn[PackedBatch]) -> TrainResult:
        """One optimizer step on this rank's share."""
        begin = time.monotonic()
        metrics = self._engine.forward_backward(micro_batches, loss_fn)
        step = self._engine.optim_step()
        return TrainResult(step=step, metrics=metrics, seconds=time.monotonic() - begin)

    def with_ref_logprobs(self, micro_batches: list[PackedBatch]) -> list[PackedBatch]:
        """The same micro-batches with the reference's logprobs of their tokens."""
        if self._reference is None:
            raise RuntimeError("expected a reference policy; give the job one: make_reference")
        return [
            dataclasses.replace(batch, ref_logprobs=logprobs.cpu())
            for batch, logprobs in zip(
                micro_batches, self._reference.logprobs(micro_batches), strict=True
            )
        ]

    def publish(self, folder: Path, dtype: Dtype) -> PublishedWeights | None:
        """Put the weights where the sampler finds them; rank 0 writes, the others take part."""
        weights = self._engine.export_weights()
        if self._rank > 0:
            for _ in weights:
                pass
            return None
        return publish_weights(
            weights, version=self._engine.policy_version, folder=folder, dtype=dtype
        )

    def save_checkpoint(self, folder: Path) -> None:
        """Write the engine's complete state."""
        self._engine.save_checkpoint(folder)

    def load_checkpoint(self, folder: Path) -> None:
        """Take it back."""
        self._engine.load_checkpoint(folder)

    def save_pretrained(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        self._engine.save_pretrained(folder)


async def together(calls: Iterable[Coroutine[object, object, R]]) -> list[R]:
    """What all ranks answer.

    When one dies the others fail in the middle of a collective, and any of them may be heard
    first: a little later it is known who is gone, and that is what is raised.

    Raises:
        ActorLostError: names all ranks that are gone.
        Exception: the first error, if none is gone.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if errors_of(tasks):
            await asyncio.wait(tasks, timeout=LAST_WORDS_S)
        errors = errors_of(tasks)
        lost = [error for error in errors if isinstance(error, ActorLostError)]
        if lost:
            raise ActorLostError("; ".join(map(str, lost))) from lost[0]
        if errors:
            raise errors[0]
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()  # those that are not done


def errors_of(tasks: Iterable["asyncio.Future[R]"]) -> list[BaseException]:
    """What those raised that are done."""
    done = [task for task in tasks if task.done() and not task.cancelled()]
    return [error for task in done if (error := task.exception()) is not None]


@final
class Trainer:
    """All ranks of the trainer, called together."""

    def __init__(
        self, ranks: Sequence[Actor[TrainerRank]], *, weights_folder: Path, ulysses_size: int
    ) -> None:
        self.ranks = tuple(ranks)
        self.ulysses_size = ulysses_size
        self._weights_folder = weights_folder

    @property
    def num_shares(self) -> int:
        """Parts that a batch is dealt into: neighbours that share every sequence get the same."""
        return len(self.ranks) // self.ulysses_size

    async def train(
        self, shares: Sequence[list[PackedBatch]], loss_fn: LossFn[PackedBatch]
    ) -> TrainResult:
        """One optimizer step; see `num_shares`."""
        results = await together(
            rank.call(TrainerRank.train, shares[index // self.ulysses_size], loss_fn)
            for index, rank in enumerate(self.ranks)
        )
        return results[0]

    async def with_ref_logprobs(
        self, shares: Sequence[list[PackedBatch]]
    ) -> list[list[PackedBatch]]:
        """The same shares with the logprobs of the model that the run began with."""
        scored = await together(
            rank.call(TrainerRank.with_ref_logprobs, shares[index // self.ulysses_size])
            for index, rank in enumerate(self.ranks)
        )
        return scored[:: self.ulysses_size]

    async def publish(self, dtype: Dtype) -> PublishedWeights:
        """Put the present weights where a sampler finds them."""
        results = await together(
            rank.call(TrainerRank.publish, self._weights_folder, dtype) for rank in self.ranks
        )
        (published,) = (result for result in results if result is not None)
        return published

    async def save_checkpoint(self, folder: Path) -> None:
        """Write the engine's complete state."""
        await self._all(TrainerRank.save_checkpoint, folder)

    async def load_checkpoint(self, folder: Path) -> None:
        """Take it back."""
        await self._all(TrainerRank.load_checkpoint, folder)

    async def save_pretrained(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        await self._all(TrainerRank.save_pretrained, folder)

    async def _all(self, method: Callable[[TrainerRank, Path], None], folder: Path) -> None:
        await together(rank.call(method, folder) for rank in self.ranks)


class Samplers(Sampler, Protocol):
    """What a loop needs of one sampler or several: a `ReplicaSet` fits."""

    async def load_published(self, published: PublishedWeights) -> None:
        """Take new weights; after it no token is drawn from older ones."""


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
    cluster: Cluster, config: VllmConfig, *, count: int
) -> tuple[ReplicaSet, list[Actor[SamplerHost]]]:
    """Samplers with the weights of the model folder, each in a process of its own.

    One that dies is replaced by another of the same name, which takes the newest weights before it
    serves; its requests are drawn again by those that are left.
    """
    actors: dict[int, Actor[SamplerHost]] = {}

    async def start(number: int) -> RemoteReplica:
        name = "sampler" if count == 1 else f"sampler {number}"
        if number in actors:
            actors[number].stop()
        actor = cluster.actor(name).start(
            SamplerHost, replica_config(config, number), policy_version=PolicyVersion(0)
        )
        actors[number] = actor
        return await RemoteReplica.start(ActorRemote(actor), name=name)

    samplers = await ReplicaSet.start(
        start,
        ReplicaSetConfig(num_replicas=count),
        policy_version=PolicyVersion(0),
        dtype=config.dtype,
    )
    return samplers, [actors[number] for number in range(count)]
