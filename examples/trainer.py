"""The Ray actors that train, one per rank. Wiring, no algorithm."""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, final

import torch
from placement import Placement
from torch import Tensor
from turns import Turns

from async_policy import Actor, ActorLostError, Cluster
from device_env import snapshot
from parallel_state.process_group import init_process_group
from rl_contracts.train import (
    Checkpointable,
    LossFn,
    PackedBatch,
    PretrainedExporter,
    StepResult,
    TrainEngine,
)
from rollout_vllm import Dtype, PublishedWeights, publish_weights


class Movable(Protocol):
    """What can give its device's memory away for a while."""

    def to_host(self) -> None:
        """Free the device's memory until `to_device`."""

    def to_device(self) -> None:
        """Take it back."""


class Engine(TrainEngine, Checkpointable, PretrainedExporter, Movable, Protocol):
    """What the trainer needs of an engine: engine-fsdp and engine-veomni both fit."""


class Scorer(Movable, Protocol):
    """A frozen policy; `FsdpScorer` and `VeomniScorer` both fit."""

    def logprobs(self, micro_batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Log-probabilities of the given tokens, one tensor per micro-batch."""


R = TypeVar("R")

CALL_TIMEOUT_S = 7200.0
"""How long a call may take: a step or a group of long completions of a large model, with a margin.
A process that has died or hangs is found long before, by what its connection or its ping says."""

READY_TIMEOUT_S = 1800.0
"""How long an actor may take to be ready: a large model that comes from a slow disk fits in."""

LAST_WORDS_S = 10.0
"""How long ranks have to say what happened to them, once one has failed."""

MakeEngine = Callable[[torch.device], Engine]
"""Makes a rank's engine on its device, in the rank's process, after the ranks have met."""

MakeReference = Callable[[torch.device], Scorer]
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
        backend: str,
        device: torch.device,
        offloaded: bool,
    ) -> None:
        init_process_group(
            rank=rank, world_size=num_ranks, init_method=meeting_point, backend=backend
        )
        self._rank = rank
        self._device = device
        self._offloaded = offloaded
        self._engine = make_engine(device)
        self._reference = None if make_reference is None else make_reference(device)

    def environment(self) -> dict[str, str]:
        """The variables that this process sees, for the run folder."""
        return snapshot(os.environ)

    def train(self, micro_batches: list[PackedBatch], loss_fn: LossFn[PackedBatch]) -> TrainResult:
        """One optimizer step on this rank's share."""
        begin = time.monotonic()
        metrics = self._engine.forward_backward(micro_batches, loss_fn)
        step = self._engine.optim_step()
        return TrainResult(step=step, metrics=metrics, seconds=time.monotonic() - begin)

    def ref_logprobs(self, micro_batches: list[PackedBatch]) -> list[Tensor]:
        """The reference's logprobs of their tokens, one tensor per micro-batch."""
        if self._reference is None:
            raise RuntimeError("expected a reference policy; give the job one: make_reference")
        return [logprobs.cpu() for logprobs in self._reference.logprobs(micro_batches)]

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

    def to_host(self) -> None:
        """Free the device's memory until `to_device`."""
        for part in self._on_device():
            part.to_host()
        torch.get_device_module(self._device).empty_cache()

    def to_device(self) -> None:
        """Take it back."""
        for part in self._on_device():
            part.to_device()

    def _on_device(self) -> list[Movable]:
        if self._offloaded:
            return []
        return [self._engine] if self._reference is None else [self._engine, self._reference]

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
        self._turn: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext

    def take_turns(self, turns: Turns) -> None:
        """Compute only while the devices are the trainer's."""
        self._turn = turns.training

    @property
    def num_shares(self) -> int:
        """Parts that a batch is dealt into: neighbours that share every sequence get the same."""
        return len(self.ranks) // self.ulysses_size

    async def train(
        self, shares: Sequence[list[PackedBatch]], loss_fn: LossFn[PackedBatch]
    ) -> TrainResult:
        """One optimizer step; see `num_shares`."""
        async with self._turn():
            results = await together(
                rank.call(TrainerRank.train, shares[index // self.ulysses_size], loss_fn)
                for index, rank in enumerate(self.ranks)
            )
        return results[0]

    async def with_ref_logprobs(
        self, shares: Sequence[list[PackedBatch]]
    ) -> list[list[PackedBatch]]:
        """The same shares with the logprobs of the model that the run began with."""
        async with self._turn():
            scored = await together(
                rank.call(TrainerRank.ref_logprobs, shares[index // self.ulysses_size])
                for index, rank in enumerate(self.ranks)
            )
        return [
            [
                dataclasses.replace(batch, ref_logprobs=logprobs)
                for batch, logprobs in zip(share, of_share, strict=True)
            ]
            for share, of_share in zip(shares, scored[:: self.ulysses_size], strict=True)
        ]

    async def publish(self, dtype: Dtype) -> PublishedWeights:
        """Put the present weights where a sampler finds them."""
        async with self._turn():
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

    async def to_host(self) -> None:
        """Free the memory of all devices until `to_device`."""
        await together(rank.call(TrainerRank.to_host) for rank in self.ranks)

    async def to_device(self) -> None:
        """Take it back."""
        await together(rank.call(TrainerRank.to_device) for rank in self.ranks)

    async def _all(self, method: Callable[[TrainerRank, Path], None], folder: Path) -> None:
        async with self._turn():
            await together(rank.call(method, folder) for rank in self.ranks)


def start_trainer(
    cluster: Cluster,
    make_engine: MakeEngine,
    make_reference: MakeReference | None,
    *,
    placement: Placement,
    weights: Path,
    ulysses_size: int,
    offloaded: bool,
) -> Trainer:
    """One process per rank; they meet at a file, so that no port is opened for it.

    Args:
        cluster: where.
        make_engine: makes a rank's engine.
        make_reference: makes a rank's part of the reference policy; None if there is none.
        placement: the device of each rank.
        weights: a folder for files that the processes of the run pass each other.
        ulysses_size: ranks that share every sequence.
        offloaded: whether the engine keeps its weights in host memory between calls anyway.
    """
    num_ranks = len(placement.ranks)
    meeting_point = f"file://{weights / 'ranks-meet-here'}"
    ranks = [
        cluster.actor(
            f"trainer rank {rank}",
            environment=placement.environment(ids),
            call_timeout_s=CALL_TIMEOUT_S,
        ).start(
            TrainerRank,
            make_engine,
            make_reference,
            rank=rank,
            num_ranks=num_ranks,
            meeting_point=meeting_point,
            backend=placement.backend,
            device=placement.torch_device,
            offloaded=offloaded,
        )
        for rank, ids in enumerate(placement.ranks)
    ]
    return Trainer(ranks, weights_folder=weights / "published", ulysses_size=ulysses_size)
