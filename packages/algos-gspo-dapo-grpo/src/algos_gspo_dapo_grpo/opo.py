"""OPO: a group baseline that weighs each sample with its length, which minimises the variance.

Source: Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585. The
optimal baseline weighs rewards with squared gradient norms; these grow about as the length does.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from algos_gspo_dapo_grpo.groups import check_per_sample, grouped


def opo_advantages(
    rewards: Float[Tensor, " samples"],
    group_ids: Int[Tensor, " samples"],
    num_tokens: Int[Tensor, " samples"],
    *,
    accepted: Bool[Tensor, " samples"] | None = None,
) -> Float[Tensor, " samples"]:
    """``reward - sum_j(tokens_j * reward_j) / sum_j(tokens_j)`` within the group.

    Args:
        rewards: one per sample; NaN or infinite where there is none.
        group_ids: equal for the samples of one prompt.
        num_tokens: tokens in each sample's loss mask; a sample without any has no weight in the
            baseline.
        accepted: as in `grpo_advantages`.

    Returns:
        One advantage per sample, in reward units, float32 or better; always finite. A group with
        fewer than two scored samples, or of equal rewards, gives 0.
    """
    groups = grouped(rewards, group_ids, accepted)
    check_per_sample("num_tokens", num_tokens, like=rewards)
    return groups.weighted_centre(num_tokens.to(groups.rewards.dtype))
