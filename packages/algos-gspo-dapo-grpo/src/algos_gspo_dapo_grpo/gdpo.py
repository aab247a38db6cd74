"""GDPO: several rewards, each normalised within its group before they are added up.

Normalising the sum, as GRPO does, makes combinations of rewards with the same sum
indistinguishable, and lets the reward with the largest spread drown the others.

Source: "GDPO: Group reward-Decoupled Normalization Policy Optimization", arXiv:2601.05242,
section 3, eq. 6 and 7.
"""

import math
from collections.abc import Sequence
from typing import final

import attrs
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from algos_gspo_dapo_grpo.advantages import GrpoAdvantages, grpo_advantages
from algos_gspo_dapo_grpo.groups import check_per_sample
from algos_gspo_dapo_grpo.precision import at_least_float32
from algos_gspo_dapo_grpo.whitening import whitened


def _check_weights(_: object, __: object, value: Sequence[float]) -> None:
    if not value or not any(value):
        raise ValueError(
            f"GdpoAdvantages: expected at least one reward weight that is not 0, got {value!r}: "
            "every advantage would be 0"
        )
    if not all(map(math.isfinite, value)):
        raise ValueError(f"GdpoAdvantages: expected finite reward weights, got {value!r}")


@final
@attrs.frozen(kw_only=True)
class GdpoAdvantages:
    """Weights of the rewards, and how each is normalised within its group."""

    weights: tuple[float, ...] = attrs.field(validator=_check_weights)
    """Weight of each reward after its normalisation, in the order of the columns."""

    within_group: GrpoAdvantages = attrs.field(factory=GrpoAdvantages)
    """How each reward is normalised by itself. Default: as GRPO normalises the sum."""


def gdpo_advantages(
    rewards: Float[Tensor, "samples rewards"],
    group_ids: Int[Tensor, " samples"],
    *,
    config: GdpoAdvantages,
    num_tokens: Int[Tensor, " samples"] | None = None,
    accepted: Bool[Tensor, " samples"] | None = None,
) -> Float[Tensor, " samples"]:
    """Weighted sum of group-normalised rewards, whitened over the batch (arXiv:2601.05242).

    Args:
        rewards: one column per reward; NaN or infinite where that one could not be scored, which
            leaves out this one reward of this sample.
        group_ids: equal for the samples of one prompt.
        config: the weights.
        num_tokens: tokens in each sample's loss mask, if mean and variance of the batch are to
            be those over tokens, as in verl. None: each sample counts once, as in TRL.
        accepted: False for samples that are not trained on. None: all are accepted.

    Returns:
        One advantage per sample, unit 1, float32 or better; always finite. A sample without any
        scored reward gets 0 and stays out of the batch's mean.

    Raises:
        ValueError: if there are not as many weights as rewards.
    """
    if rewards.ndim != 2 or rewards.shape[1] != len(config.weights):  # noqa: PLR2004  # a matrix
        raise ValueError(
            f"gdpo_advantages: expected {len(config.weights)} columns of rewards, one per weight, "
            f"got shape {tuple(rewards.shape)}"
        )
    rewards = at_least_float32(rewards.detach())
    total = torch.zeros_like(rewards[:, 0])
    for column, weight in enumerate(config.weights):
        total = total + weight * grpo_advantages(
            rewards[:, column], group_ids, config=config.within_group, accepted=accepted
        )
    counted = torch.isfinite(rewards).any(dim=1)
    if accepted is not None:
        counted = counted & accepted
    if num_tokens is None:
        per_sample = torch.ones_like(total)
    else:
        check_per_sample("num_tokens", num_tokens, like=total)
        per_sample = num_tokens.to(total.dtype)
    return whitened(total, torch.where(counted, per_sample, 0.0))
