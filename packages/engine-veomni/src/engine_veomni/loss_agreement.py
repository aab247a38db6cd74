"""A loss function that raises on one rank stops all ranks, and leaves none waiting.

Its rank goes on with a loss of zero, so that it takes part in every collective of the backward
passes, and tells the others at the end; that costs no collective of its own.
"""

from dataclasses import replace
from typing import Generic, final

from jaxtyping import Float
from torch import Tensor

from rl_contracts.all_ranks import from_all_ranks
from rl_contracts.batch_checks import name_of
from rl_contracts.loss_tally import LossTally, total_of
from rl_contracts.rollout import PolicyVersion
from rl_contracts.train import BatchT, LossFn, PackedBatch


def for_loss(batch: BatchT) -> BatchT:
    """A micro-batch without what only the model reads, which is large.

    On the device it would be there twice, and through the backward pass.
    """
    if isinstance(batch, PackedBatch):
        return replace(batch, images=None, routed_experts=None)
    return batch


@final
class AgreedLoss(Generic[BatchT]):
    """The losses of one call of `forward_backward` on one rank, and what became of them."""

    def __init__(self, loss_fn: LossFn[BatchT]) -> None:
        self._loss_fn = loss_fn
        self._tally = LossTally()
        self._error: Exception | None = None
        self._told = ""
        self._num_batches = 0

    def __call__(
        self,
        policy_logprobs: Float[Tensor, " tokens"],
        batch: BatchT,
    ) -> Float[Tensor, ""]:
        """What to run the backward pass of the next micro-batch from.

        Args:
            policy_logprobs: of the micro-batch; carries a gradient.
            batch: the micro-batch, on the device.
        """
        if self._error is None:
            try:
                output = self._loss_fn(policy_logprobs, batch)
                loss = self._tally.add(output, batch, policy_logprobs)
            except Exception as error:  # noqa: BLE001 - raised again, once all ranks know
                self._error = error
                name = name_of(self._num_batches, batch)
                self._told = f"raised {type(error).__name__} for {name}: {error}"
            else:
                self._num_batches += 1
                return loss
        return 0.0 * policy_logprobs.sum()

    def sum_over_ranks(self, *, policy_version: PolicyVersion) -> dict[str, float]:
        """Loss and metrics over all ranks; called on all of them.

        Raises:
            Exception: what the loss function raised here.
            RuntimeError: if it raised on another rank, with its text.
            FloatingPointError: see `rl_contracts.loss_tally.total_of`.
            ValueError: likewise.
        """
        reports = from_all_ranks((self._told, self._tally.report()))
        if self._error is not None:
            raise self._error
        for rank, (told, _) in enumerate(reports):
            if told:
                message = (
                    f"forward_backward: the loss function on rank {rank} {told}; the gradient was "
                    "dropped"
                )
                raise RuntimeError(message)
        return total_of([report for _, report in reports], policy_version=policy_version)
