"""The Ray actors that train, one per rank. Wiring, no algorithm."""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

import torch
from placement import Placement
from together import together
from torch import Tensor
from turns import Turns
from weight_routes import STREAM_TIMEOUT_S, carriage_of, receivers_of

from async_policy import Actor, Cluster
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
from rollout_vllm import Dtype
from rollout_vllm.headers import TensorHeader
from rollout_vllm.offered import OfferedWeights, offered_together
from rollout_vllm.torch_headers import tensor_headers
from rollout_vllm.weights_stream import Carriage, WeightStream


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


CALL_TIMEOUT_S = 7200.0
"""How long a call may take: a step or a group of long completions of a large model, with a margin.
A process that has died or hangs is found long before, by what its connection or its ping says."""

READY_TIMEOUT_S = 1800.0
"""How long an actor may take to be ready: a large model that comes from a slow disk fits in."""

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

    peak_bytes: int
    """Most device memory that a rank's tensors took; 0 on CPUs, where nobody counts."""


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
        carriage: Carriage | None,
        folder: Path,
    ) -> None:
        init_process_group(
            rank=rank, world_size=num_ranks, init_method=meeting_point, backend=backend
        )
        self._device = device
        self._offloaded = offloaded
        self._carriage: Carriage | None = carriage
        self._folder = folder
        self._headers: dict[str, TensorHeader] | None = None
        self._stream: WeightStream | None = None
        self._engine = make_engine(device)
        self._reference = None if make_reference is None else make_reference(device)

    def environment(self) -> dict[str, str]:
        """The variables that this process sees, for the run folder."""
        return snapshot(os.environ)

    def train(self, micro_batches: list[PackedBatch], loss_fn: LossFn[PackedBatch]) -> TrainResult:
        """One optimizer step on this rank's share."""
        begin = time.monotonic()
        counts = self._device.type != "cpu"
        module = torch.get_device_module(self._device)
        if counts:
            module.reset_peak_memory_stats()
        metrics = self._engine.forward_backward(micro_batches, loss_fn)
        step = self._engine.optim_step()
        return TrainResult(
            step=step,
            metrics=metrics,
            seconds=time.monotonic() - begin,
            peak_bytes=module.max_memory_allocated() if counts else 0,
        )

    def ref_logprobs(self, micro_batches: list[PackedBatch]) -> list[Tensor]:
        """The reference's logprobs of their tokens, one tensor per micro-batch."""
        if self._reference is None:
            raise RuntimeError("expected a reference policy; give the job one: make_reference")
        return [logprobs.cpu() for logprobs in self._reference.logprobs(micro_batches)]

    def offer(self, dtype: Dtype) -> OfferedWeights | None:
        """Be ready to send the present weights; None if this rank only helps the others to."""
        if self._headers is None:
            self._headers = tensor_headers(self._engine.export_weights(), dtype=dtype)
        if self._carriage is None:
            return None
        if self._stream is None:
            self._stream = WeightStream(
                self._headers,
                dtype=dtype,
                device=self._device,
                carriage=self._carriage,
                timeout_s=STREAM_TIMEOUT_S,
                folder=self._folder,
            )
        return self._stream.offer(self._engine.policy_version)

    def send(self, num_receivers: int) -> None:
        """Send them to so many engine processes, and take part in what other ranks send."""
        weights = self._engine.export_weights()
        try:
            if self._stream is not None and num_receivers:
                self._stream.send(weights, num_receivers=num_receivers)
        finally:
            for _ in weights:  # the other ranks wait for this one in every gather that is left
                pass

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


@final
class Trainer:
    """All ranks of the trainer, called together."""

    def __init__(
        self,
        ranks: Sequence[Actor[TrainerRank]],
        *,
        placement: Placement,
        devices_per_sampler: int,
        ulysses_size: int,
    ) -> None:
        self.ranks = tuple(ranks)
        self.ulysses_size = ulysses_size
        self.placement = placement
        self.devices_per_sampler = devices_per_sampler
        # what all ranks do together they must do in the same order
        self.one_at_a_time = asyncio.Lock()
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
        async with self._turn(), self.one_at_a_time:
            results = await together(
                rank.call(TrainerRank.train, shares[index // self.ulysses_size], loss_fn)
                for index, rank in enumerate(self.ranks)
            )
        return dataclasses.replace(results[0], peak_bytes=max(r.peak_bytes for r in results))

    async def with_ref_logprobs(
        self, shares: Sequence[list[PackedBatch]]
    ) -> list[list[PackedBatch]]:
        """The same shares with the logprobs of the model that the run began with."""
        async with self._turn(), self.one_at_a_time:
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

    def weights(self, dtype: Dtype) -> "TrainerWeights":
        """The weights that it has whenever a sampler needs them."""
        return TrainerWeights(self, dtype)

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
        await self._move(TrainerRank.to_host)

    async def to_device(self) -> None:
        """Take it back."""
        await self._move(TrainerRank.to_device)

    async def _move(self, method: Callable[[TrainerRank], None]) -> None:
        async with self.one_at_a_time:
            await together(rank.call(method) for rank in self.ranks)

    async def _all(self, method: Callable[[TrainerRank, Path], None], folder: Path) -> None:
        async with self._turn(), self.one_at_a_time:
            await together(rank.call(method, folder) for rank in self.ranks)


@final
class TrainerWeights:
    """The weights of a trainer, as it has them; a `rollout_vllm.weight_source.WeightSource`."""

    def __init__(self, trainer: Trainer, dtype: Dtype) -> None:
        self._trainer = trainer
        self._dtype: Dtype = dtype

    @property
    def shares_devices(self) -> bool:
        """Whether samplers must make room for the trainer before it can send."""
        return self._trainer.placement.shared

    async def take_devices(self) -> None:
        """Bring the trainer to the devices."""
        await self._trainer.to_device()

    async def leave_devices(self) -> None:
        """Take it away."""
        await self._trainer.to_host()

    @contextlib.asynccontextmanager
    async def offering(self) -> AsyncIterator[OfferedWeights]:
        """An offer of all ranks that send; the trainer does nothing else inside."""
        async with self._trainer.one_at_a_time:
            offers = await together(
                rank.call(TrainerRank.offer, self._dtype) for rank in self._trainer.ranks
            )
            yield offered_together([offer for offer in offers if offer is not None])

    async def send(self, replicas: Sequence[int]) -> None:
        """Send what is offered to these samplers."""
        trainer = self._trainer
        receivers = receivers_of(
            trainer.placement, replicas, devices_per_sampler=trainer.devices_per_sampler
        )
        await together(
            rank.call(TrainerRank.send, count)
            for rank, count in zip(trainer.ranks, receivers, strict=True)
        )


def start_trainer(
    cluster: Cluster,
    make_engine: MakeEngine,
    make_reference: MakeReference | None,
    *,
    placement: Placement,
    scratch: Path,
    devices_per_sampler: int,
    ulysses_size: int,
    offloaded: bool,
) -> Trainer:
    """One process per rank; they meet at a file, so that no port is opened for it.

    Args:
        cluster: where.
        make_engine: makes a rank's engine.
        make_reference: makes a rank's part of the reference policy; None if there is none.
        placement: the device of each rank.
        scratch: a folder, best in memory, where the processes of the run meet.
        devices_per_sampler: engine processes of one sampler, which all take weights.
        ulysses_size: ranks that share every sequence.
        offloaded: whether the engine keeps its weights in host memory between calls anyway.
    """
    num_ranks = len(placement.ranks)
    meeting_point = f"file://{scratch / 'ranks-meet-here'}"
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
            carriage=carriage_of(placement, rank),
            folder=scratch,
        )
        for rank, ids in enumerate(placement.ranks)
    ]
    return Trainer(
        ranks,
        placement=placement,
        devices_per_sampler=devices_per_sampler,
        ulysses_size=ulysses_size,
    )
