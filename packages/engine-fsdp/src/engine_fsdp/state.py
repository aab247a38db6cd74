"""Everything that a training run on one rank would lose: put into folders and taken back."""

from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from engine_fsdp.checkpoint import random_states, read_state, read_tensor, shards_to_write
from engine_fsdp.model import PackedCausalLM
from engine_fsdp.optimizer import PolicyOptimizer
from engine_fsdp.saving import PendingCheckpoint, prepare_folder, staged, write_folder
from engine_fsdp.training_set import check_frozen, digest
from rl_contracts.rollout import PolicyVersion


@final
class TrainingState:
    """Weights, optimizer, random states and version. Every method is called on every rank."""

    def __init__(
        self,
        model: PackedCausalLM,
        optimizer: PolicyOptimizer,
        *,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        """Look at a sharded model and its optimizer, which go on being others'.

        Args:
            model: whose parameters that the optimizer does not have are frozen.
            optimizer: of the others.
            mesh: that the model is sharded over.
            device: whose random states belong to it.
        """
        self._model = model
        self._optimizer = optimizer
        self._mesh = mesh
        self._device = device
        self._group = dist.new_group(backend="gloo")
        self._pending: PendingCheckpoint | None = None

    def tensors(self, version: PolicyVersion) -> dict[str, Tensor]:
        """All but the random states: the tensors themselves, to be copied from or into.

        Of frozen weights there is a digest alone; they are those of the model's folder.
        """
        frozen = self._frozen()
        weights = {
            f"model.{name}": weight.detach()
            for name, weight in self._model.named_weights()
            if name not in frozen
        }
        state = {
            "policy_version": torch.tensor([version], dtype=torch.int64),
            **self._optimizer.state(),
            **weights,
        }
        return {**state, "frozen": digest(frozen, mesh=self._mesh)} if frozen else state

    def save(self, folder: Path, version: PolicyVersion) -> None:
        """See `FsdpEngine.save_checkpoint`."""
        self._finish_pending()
        shards = shards_to_write({**self.tensors(version), **random_states(self._device)})
        prepare_folder(folder, self._group)
        write_folder(folder, shards, self._group)

    def begin(self, folder: Path, version: PolicyVersion) -> PendingCheckpoint:
        """See `FsdpEngine.begin_checkpoint`."""
        self._finish_pending()
        shards = shards_to_write({**self.tensors(version), **random_states(self._device)})
        prepare_folder(folder, self._group)
        self._pending = PendingCheckpoint(folder, staged(shards), self._group)
        return self._pending

    def load(self, folder: Path, version: PolicyVersion) -> PolicyVersion:
        """See `FsdpEngine.load_checkpoint`; returns the version of the checkpoint."""
        self._finish_pending()
        state = self.tensors(version)
        if "frozen" in state:
            there = read_tensor("frozen", folder)
            check_frozen(state["frozen"], there, list(self._frozen()), folder=folder)
        read_state(state, folder, device=self._device)
        return PolicyVersion(int(state["policy_version"].item()))

    def _frozen(self) -> dict[str, Tensor]:
        return {
            name: parameter
            for name, parameter in self._model.model.named_parameters()
            if name not in self._optimizer.parameters
        }

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
