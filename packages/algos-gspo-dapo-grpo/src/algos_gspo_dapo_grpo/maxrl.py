"""MaxRL: centred rewards divided by the group's mean, so that rare successes weigh more.

Source: Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning", arXiv:2602.02710,
algorithm 1.
With rewards 0 and 1 the mean is the success rate p, and dividing by p turns the gradient of the
expected reward into that of its logarithm, up to the order that the group size allows.
"""

from typing import ClassVar, Literal, final

import attrs
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from algos_gspo_dapo_grpo.groups import grouped
from algos_gspo_dapo_grpo.validators import positive_validator


@final
@attrs.frozen(kw_only=True)
class MaxRlAdvantages:
    """``(reward - group mean) / group mean``, for rewards that are never negative."""

    kind: ClassVar[Literal["maxrl"]] = "maxrl"

    epsilon: float = attrs.field(default=1e-6, validator=positive_validator)
    """Added to the mean, in reward units. The paper has none; default: as for GRPO."""


def maxrl_advantages(
    rewards: Float[Tensor, " samples"],
    group_ids: Int[Tensor, " samples"],
    *,
    config: MaxRlAdvantages,
    accepted: Bool[Tensor, " samples"] | None = None,
) -> Float[Tensor, " samples"]:
    """Rewards centred at, and divided by, the mean of their group (arXiv:2602.02710).

    Arguments as in `grpo_advantages`; rewards are success rates, so 0 or more.

    Returns:
        One advantage per sample, unit 1, float32 or better; always finite. A group whose mean is
        not positive gives 0: without a success there is nothing to make likelier, and a
        negative mean is no success rate.
    """
    groups = grouped(rewards, group_ids, accepted)
    mean = groups.lowest + groups.sum(groups.above_lowest) / groups.num_scored.clamp(min=1.0)
    succeeded = mean > 0
    divisor = torch.where(succeeded, mean, 1.0) + config.epsilon
    return torch.where(succeeded, groups.weighted_centre() / divisor, 0.0)
