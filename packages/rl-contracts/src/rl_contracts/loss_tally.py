"""Adds up what a loss function returned, and finds what would train nothing without a word.

What is wrong with a loss on one rank is kept until all ranks are through their backward passes: an
error in the middle would leave the others waiting in a collective.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from rl_contracts.all_ranks import from_all_ranks
from rl_contracts.batch_checks import name_of
from rl_contracts.rollout import PolicyVersion
from rl_contracts.train import LossOutput, TokenBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class TallyReport:
    """What one rank says of its losses."""

    sums: Mapping[str, float]
    """``loss`` and metrics, added up over micro-batches."""

    problem: str
    """What is wrong with the first micro-batch's loss that is not as it should be, or nothing."""

    not_finite: str
    """The micro-batches whose loss is not finite, or nothing."""


@final
class LossTally:
    """What the loss function returned for the micro-batches of one call, on one rank."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._problem = ""
        self._losses: list[Tensor] = []
        self._names: list[str] = []

    def add(
        self, output: LossOutput, batch: TokenBatch, policy_logprobs: Float[Tensor, " tokens"]
    ) -> Float[Tensor, ""]:
        """Take in one micro-batch, and return what to run the backward pass from.

        That is the loss, or zero if it carries no gradient: other ranks may be in the same backward
        pass. Waits for the device only for a loss that carries none.
        """
        name = name_of(len(self._losses), batch)
        shares = {**output.metrics, "loss": output.loss}
        not_scalar = [share for share, value in shares.items() if value.shape != ()]
        if "loss" in output.metrics:
            self._refuse("'loss' is no name for a metric, since it is the loss's; rename it")
        elif not_scalar:
            shape = tuple(shares[not_scalar[0]].shape)
            self._refuse(f"expected a scalar {not_scalar[0]} of {name}, got shape {shape}")
        elif not output.loss.requires_grad and bool(batch.loss_mask.any()):
            self._refuse(
                f"the loss of {name} carries no gradient, although its loss_mask holds tokens; "
                "compute it from the policy_logprobs that the loss function is handed"
            )
        elif self._sums and self._sums.keys() != shares.keys():
            self._refuse(
                f"{name} has the metrics {sorted(shares)}, those before it have "
                f"{sorted(self._sums)}; return the same for each"
            )
        for share, value in shares.items():
            total = value.detach().to(torch.float64).sum()
            self._sums[share] = self._sums[share] + total if share in self._sums else total
        self._losses.append(output.loss.detach())
        self._names.append(name)
        if output.loss.requires_grad and not not_scalar:
            return output.loss
        return 0.0 * policy_logprobs.sum()

    def report(self) -> TallyReport:
        """What to tell the other ranks; reads the losses."""
        return TallyReport(
            sums={name: total.item() for name, total in self._sums.items()},
            problem=self._problem,
            not_finite="; ".join(
                f"{name}: {loss.item()}"
                for name, loss in zip(self._names, self._losses, strict=True)
                if loss.shape == () and not math.isfinite(loss.item())
            ),
        )

    def sum_over_ranks(self, *, policy_version: PolicyVersion) -> dict[str, float]:
        """Loss and metrics over all ranks of torch.distributed; see `total_of`."""
        return total_of(from_all_ranks(self.report()), policy_version=policy_version)

    def _refuse(self, problem: str) -> None:
        self._problem = self._problem or problem


def total_of(reports: Sequence[TallyReport], *, policy_version: PolicyVersion) -> dict[str, float]:
    """Add up the reports of all ranks. The caller drops the gradient if this raises.

    Raises:
        FloatingPointError: if a loss is not finite; names the rank, micro-batch and trajectories.
        ValueError: if a loss carries no gradient, or if metrics differ; names the same.
    """
    for rank, report in enumerate(reports):
        if report.not_finite:
            message = (
                f"forward_backward: the loss is not finite at policy version {policy_version} on "
                f"rank {rank}, in {report.not_finite}; the gradient was dropped"
            )
            raise FloatingPointError(message)
    names = sorted(reports[0].sums)
    for rank, report in enumerate(reports):
        problem = report.problem
        if not problem and sorted(report.sums) != names:
            problem = f"expected the metrics of rank 0, {names}, got {sorted(report.sums)}"
        if problem:
            message = f"forward_backward: on rank {rank}, {problem}; the gradient was dropped"
            raise ValueError(message)
    return {name: math.fsum(report.sums[name] for report in reports) for name in reports[0].sums}
