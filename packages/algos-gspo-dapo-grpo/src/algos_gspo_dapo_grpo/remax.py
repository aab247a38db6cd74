"""ReMax: the baseline of a sample is the reward of its prompt's greedy completion.

Source: Li et al. 2023, "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method
for Aligning Large Language Models", arXiv:2310.10505.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.groups import check_accepted, check_per_sample
from algos_gspo_dapo_grpo.precision import at_least_float32


def remax_advantages(
    rewards: Float[Tensor, " samples"],
    greedy_rewards: Float[Tensor, " samples"],
    *,
    accepted: Bool[Tensor, " samples"] | None = None,
) -> Float[Tensor, " samples"]:
    """``reward - reward of the greedy completion`` (arXiv:2310.10505).

    Args:
        rewards: one per sample; NaN or infinite where there is none.
        greedy_rewards: for each sample, the reward of a completion of the same prompt that takes
            the likeliest token everywhere (temperature 0), under the same weights.
        accepted: False for samples that are not trained on. None: all are accepted.

    Returns:
        One advantage per sample, in reward units, float32 or better; always finite: 0 where
        either reward is not, since a sample without a baseline has no advantage.
    """
    check_per_sample("rewards", rewards, like=rewards)
    check_per_sample("greedy_rewards", greedy_rewards, like=rewards)
    if accepted is not None:
        check_accepted(accepted, like=rewards)
    difference = at_least_float32(rewards.detach()) - at_least_float32(greedy_rewards.detach())
    usable = torch.isfinite(difference)
    if accepted is not None:
        usable = usable & accepted
    return torch.where(usable, difference, 0.0)
