"""A frozen policy that scores tokens with the same code as the one that is trained."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from engine_fsdp.compute import ShardedPolicy
from engine_fsdp.config import FsdpConfig
from engine_fsdp.devices import claim_device
from engine_fsdp.model import load_model
from engine_fsdp.roll_call import RollCall, require_process_group
from parallel_state.mesh import build_meshes
from parallel_state.parking import (
    Parked,
    park,
    require_on_device,
    require_parkable,
    unpark,
)
from rl_contracts.batch_checks import check_shared, check_together
from rl_contracts.rollout import PolicyVersion
from rl_contracts.train import BatchT


@final
class FsdpScorer:
    """The weights of a folder, for good: the reference policy of a KL term, or a teacher.

    Built from the policy's own config it computes what the policy computed at version 0, bit for
    bit. Another folder: ``attrs.evolve(config, model_path=...)``. Every rank builds one, and calls
    the same methods in the same order. It has no optimizer and no gradient, so it takes 4 bytes per
    weight, divided by the shards.
    """

    def __init__(self, config: FsdpConfig, *, device: torch.device) -> None:
        """Load and shard the weights; `FsdpEngine` says what is refused.

        Args:
            config: of the policy that is scored against; what it says of the optimizer concerns
                the policy alone.
            device: where this rank computes.
        """
        require_process_group("FsdpScorer")
        self._config = config
        self._device = claim_device(device, config)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        self._model = load_model(Path(config.model_path), temperature=config.temperature)
        self._model.requires_grad_(False)
        self._policy = ShardedPolicy(
            self._model,
            config=config,
            device=self._device,
            meshes=build_meshes(config.parallel, device.type),
        )
        self._vocab_size: int = self._model.model.get_input_embeddings().num_embeddings
        self._roll_call = RollCall(timeout_s=config.wait_timeout_s)
        self._parked: Parked | None = None

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[BatchT]) -> list[Float[Tensor, " tokens"]]:
        """Log-probabilities of the given tokens; see `TrainEngine.logprobs`.

        Raises:
            ValueError: on every rank, if the ranks were given different numbers of micro-batches,
                or one of them is malformed.
            RuntimeError: if the weights are in host memory.
            TimeoutError: if a rank does not come; see `RollCall`.
        """
        require_on_device("FsdpScorer.logprobs", self._parked)
        self._roll_call.answer("logprobs", policy_version=PolicyVersion(0))
        check_together("logprobs", micro_batches, vocab_size=self._vocab_size)
        check_shared("logprobs", micro_batches, ulysses_size=self._config.parallel.ulysses_size)
        prepared = [self._policy.prepare(batch) for batch in micro_batches]
        try:
            return [self._policy.statistics(inputs).logprobs for inputs in prepared]
        finally:
            self._policy.reshard()

    def to_host(self) -> None:
        """Move the weights to host memory until `to_device`; see `FsdpEngine.to_host`."""
        require_parkable(
            "FsdpScorer.to_host", self._parked, self._device, offload=self._config.offload
        )
        self._parked = park(self._model.parameters(), self._device)

    def to_device(self) -> None:
        """Take the weights back.

        Raises:
            RuntimeError: if they are on the device.
        """
        unpark("FsdpScorer.to_device", self._parked)
        self._parked = None
