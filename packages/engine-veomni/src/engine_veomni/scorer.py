"""A frozen policy that scores tokens with the same code as the one that is trained."""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from engine_veomni.config import VeomniConfig
from engine_veomni.sharded_policy import ShardedPolicy
from parallel_state.parking import (
    Parked,
    held_by,
    park,
    require_on_device,
    require_parkable,
    unpark,
)
from rl_contracts.batch_checks import check_shared, check_together
from rl_contracts.train import BatchT


@final
class VeomniScorer:
    """The weights of a folder, for good: the reference policy of a KL term, or a teacher.

    Built from the policy's own config it computes what the policy computed at version 0, bit for
    bit. Another folder: ``attrs.evolve(config, model_path=...)``. Every rank builds one, after its
    engine if it has one, and calls the same methods in the same order. It has no optimizer and no
    gradient, so it takes 4 bytes per weight, divided by the shards.
    """

    def __init__(self, config: VeomniConfig, *, device: torch.device) -> None:
        """Load and shard the weights; `VeomniEngine` says what is refused.

        Args:
            config: of the policy that is scored against; what it says of the optimizer, the export
                and the router concerns the policy alone.
            device: where this rank computes.
        """
        self._policy = ShardedPolicy(config, device=device)
        self._policy.model.requires_grad_(False)
        self._config = config
        self._device = device
        self._parked: Parked | None = None

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[BatchT]) -> list[Float[Tensor, " tokens"]]:
        """Log-probabilities of the given tokens; see `TrainEngine.logprobs`.

        Raises:
            ValueError: on every rank, if the ranks were given different numbers of micro-batches,
                or one of them is malformed.
            RuntimeError: while the weights are in host memory; see `to_host`.
        """
        require_on_device("VeomniScorer.logprobs", self._parked)
        check_together(
            "logprobs",
            micro_batches,
            vocab_size=self._policy.vocab_size,
            check_images=self._policy.image_check,
        )
        check_shared("logprobs", micro_batches, ulysses_size=self._config.parallel.ulysses_size)
        try:
            found = []
            for batch in micro_batches:
                with self._policy.entered():
                    found.append(self._policy.logprobs(batch))
            return found
        finally:
            self._policy.reshard()

    def to_host(self) -> None:
        """Move the weights to host memory until `to_device`; see `VeomniEngine.to_host`."""
        require_parkable(
            "VeomniScorer.to_host", self._parked, self._device, offload=self._config.offload
        )
        self._park()

    def to_device(self) -> None:
        """Take the weights back.

        Raises:
            RuntimeError: if they are on the device.
        """
        unpark("VeomniScorer.to_device", self._parked)
        self._parked = None

    def _park(self) -> None:
        self._parked = park(held_by(self._policy.model), self._device)
