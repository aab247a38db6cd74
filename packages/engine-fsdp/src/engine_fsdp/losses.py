"""Calls of the loss function, so that what goes wrong on one rank is an error on all of them.

Between two micro-batches nothing is said between ranks. A rank whose loss function raises goes on
through the backward passes with a loss of 0, since the others are in the same collectives, and all
of them hear of it at the end, with the losses and metrics that they exchange there in any case.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, final

from jaxtyping import Float
from torch import Tensor

from rl_contracts.all_ranks import from_all_ranks
from rl_contracts.batch_checks import name_of
from rl_contracts.loss_tally import LossTally, TallyReport, total_of
from rl_contracts.rollout import PolicyVersion
from rl_contracts.train import BatchT, LossFn


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    """What one rank says at the end."""

    tally: TallyReport
    failed: str
    """What its loss function raised, and for which micro-batch, or nothing."""


@final
class GuardedLosses(Generic[BatchT]):
    """The losses of one call of `forward_backward`, on one rank."""

    def __init__(self, loss_fn: LossFn[BatchT]) -> None:
        self._loss_fn = loss_fn
        self._tally = LossTally()
        self._error: Exception | None = None
        self._failed = ""
        self._names: list[str] = []
        self._finite: list[Tensor] = []

    def take(
        self, policy_logprobs: Float[Tensor, " tokens"], on_device: BatchT, batch: BatchT
    ) -> Float[Tensor, ""]:
        """Call the loss function, and return what to run the backward pass from.

        Args:
            policy_logprobs: carries the gradient.
            on_device: the micro-batch, for the loss function.
            batch: the same as it was given, for its names.
        """
        name = name_of(len(self._names), batch)
        self._names.append(name)
        if self._error is not None:
            return 0.0 * policy_logprobs.sum()
        try:
            output = self._loss_fn(policy_logprobs, on_device)
            loss = self._tally.add(output, batch, policy_logprobs)
        except Exception as error:  # noqa: BLE001  # raised by `sum_over_ranks`
            self._error = error
            self._failed = f"{name}: {type(error).__name__}: {error}"
            return 0.0 * policy_logprobs.sum()
        # Looked at only if the gradient turns out not to be finite: nothing waits for the device.
        if policy_logprobs.requires_grad:
            policy_logprobs.register_hook(lambda grad: self._finite.append(grad.isfinite().all()))
        return loss

    def not_finite_gradients(self) -> str:
        """The micro-batches whose loss has a gradient that is not finite, or nothing."""
        return "; ".join(
            name
            for name, finite in zip(self._names, self._finite, strict=False)  # none after an error
            if not finite.item()
        )

    def sum_over_ranks(
        self, *, policy_version: PolicyVersion, skip: bool
    ) -> tuple[dict[str, float], str]:
        """Loss and metrics over all ranks, and which losses are not finite if those are let pass.

        Raises:
            Exception: what the loss function raised on this rank.
            RuntimeError: if it raised on another one; names the rank and the micro-batch.
            ValueError: see `rl_contracts.loss_tally.total_of`.
            FloatingPointError: if a loss is not finite, unless `skip` lets it pass.
        """
        reports = from_all_ranks(_Report(tally=self._tally.report(), failed=self._failed))
        if self._error is not None:
            raise self._error
        for rank, report in enumerate(reports):
            if report.failed:
                message = (
                    f"forward_backward: the loss function failed on rank {rank}, in "
                    f"{report.failed}; the gradient was dropped"
                )
                raise RuntimeError(message)
        tallies = [report.tally for report in reports]
        try:
            return total_of(tallies, policy_version=policy_version), ""
        except FloatingPointError as error:
            if not skip:
                raise
            names = tallies[0].sums
            totals = {name: sum(each.sums[name] for each in tallies) for name in names}
            return totals, str(error)


def gradient_problem(
    grad_norm: float, losses: Sequence[GuardedLosses[Any]], *, policy_version: PolicyVersion
) -> str:
    """What is wrong with a gradient, in the words of all ranks, or nothing.

    Called on every rank; says something to the others only if the norm is not finite.

    Args:
        grad_norm: of the whole gradient, the same on every rank.
        losses: of the calls that added it up.
        policy_version: of the weights.
    """
    if math.isfinite(grad_norm):
        return ""
    own = "; ".join(filter(None, (each.not_finite_gradients() for each in losses)))
    named = "; ".join(
        f"rank {rank}: {text}" for rank, text in enumerate(from_all_ranks(own)) if text
    )
    where = f"the loss's own gradient is not finite in {named}"
    if not named:
        where = "every loss has a finite gradient: the model's backward pass overflows"
    return (
        f"optim_step: the gradient's norm is {grad_norm} at policy version {policy_version}: "
        f"{where}; the gradient was dropped and no weight changed"
    )
