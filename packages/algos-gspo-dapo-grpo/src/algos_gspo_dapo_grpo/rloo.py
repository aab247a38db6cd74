"""RLOO: the baseline of a sample is the mean reward of its siblings, itself left out.

Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for
Learning from Human Feedback in LLMs", arXiv:2402.14740, the RLOO estimator.
"""

from typing import ClassVar, Literal, final

import attrs
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from algos_gspo_dapo_grpo.groups import grouped


@final
@attrs.frozen(kw_only=True)
class RlooAdvantages:
    """``reward - mean of the siblings' rewards``, undivided. Nothing to set."""

    kind: ClassVar[Literal["rloo"]] = "rloo"


def rloo_advantages(
    rewards: Float[Tensor, " samples"],
    group_ids: Int[Tensor, " samples"],
    *,
    accepted: Bool[Tensor, " samples"] | None = None,
) -> Float[Tensor, " samples"]:
    """Rewards minus the leave-one-out mean of their group (arXiv:2402.14740).

    With n scored samples this is ``n / (n - 1)`` times the reward centred at the group's mean,
    which is how it is computed: equal rewards give exactly 0. Arguments as in `grpo_advantages`.

    Returns:
        One advantage per sample, in reward units, float32 or better; always finite. A sample
        without a scored sibling gets 0.
    """
    groups = grouped(rewards, group_ids, accepted)
    others = (groups.num_scored - 1.0).clamp(min=1.0)
    return groups.weighted_centre() * torch.where(groups.scored, groups.num_scored / others, 0.0)
