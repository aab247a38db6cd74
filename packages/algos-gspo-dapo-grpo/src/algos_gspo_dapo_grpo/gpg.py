"""GPG: the plain policy gradient on group-centred rewards, without ratio, clip or reference.

Source: Chu et al. 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline for Model
Reasoning", arXiv:2504.02546.
"""

from typing import ClassVar, Literal, final

import attrs
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from algos_gspo_dapo_grpo.groups import grouped


@final
@attrs.frozen(kw_only=True)
class GpgAdvantages:
    """``alpha * (reward - group mean) / normaliser``."""

    kind: ClassVar[Literal["gpg"]] = "gpg"

    normaliser: float = attrs.field(default=1.0, validator=attrs.validators.gt(0.0))
    """Divides every advantage, the paper's F_norm. Default: 1, as the paper recommends."""


def gpg_advantages(
    rewards: Float[Tensor, " samples"],
    group_ids: Int[Tensor, " samples"],
    *,
    config: GpgAdvantages,
    accepted: Bool[Tensor, " samples"] | None = None,
) -> Float[Tensor, " samples"]:
    """Rewards centred within their group, scaled up for the samples without a gradient.

    ``alpha = N / (N - M)``: of N scored samples of the batch M are in groups of equal rewards
    and add nothing to the gradient, which the factor makes up for (arXiv:2504.02546, "accurate
    gradient estimation"). So `rewards` are those of *everything* that one optimizer step looks
    at, not of a micro-batch. Other arguments as in `grpo_advantages`.

    Returns:
        One advantage per sample, in reward units, float32 or better; always finite, and 0
        everywhere if no group has a spread.
    """
    groups = grouped(rewards, group_ids, accepted)
    centred = groups.weighted_centre()
    spread = groups.sum(centred.abs()) > 0
    num_scored = groups.scored.to(centred.dtype).sum()
    num_informative = (groups.scored & spread).to(centred.dtype).sum()
    alpha = num_scored / torch.clamp(num_informative, min=1.0)
    return alpha * centred / config.normaliser
