"""REINFORCE++: advantages whitened over the whole batch, instead of within groups.

Source: Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global
Advantage Normalization", arXiv:2501.03262, section 3.1, eq. 4 and 5. Its baseline form (section
3.2, eq. 6 and 7) centres rewards within their group first, for several samples per prompt.
"""

from typing import final

import attrs
from jaxtyping import Bool, Float, Int
from torch import Tensor

from algos_gspo_dapo_grpo.groups import check_per_sample, grouped
from algos_gspo_dapo_grpo.returns import reward_to_go
from algos_gspo_dapo_grpo.sequences import Sequences
from algos_gspo_dapo_grpo.whitening import whitened


@final
@attrs.frozen(kw_only=True)
class ReinforcePlusPlusAdvantages:
    """Whitened returns of rewards per token."""

    discount: float = attrs.field(
        default=1.0, validator=[attrs.validators.gt(0.0), attrs.validators.le(1.0)]
    )
    """Per token of the mask. Default: 1, as verl has it."""


def reinforce_plus_plus_advantages(
    token_rewards: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    config: ReinforcePlusPlusAdvantages,
) -> Float[Tensor, "*layout"]:
    """Returns whitened over all tokens of the batch (arXiv:2501.03262).

    Args:
        token_rewards: what each token is paid: usually the sequence's reward at its end
            (`outcome_token_rewards`), less a KL term per token (`kl_penalised_rewards`).
        loss_mask: True on the sampled tokens, of *everything* that one optimizer step looks at.
        sequences: boundaries of the sequences.
        config: the discount.

    Returns:
        One advantage per token, unit 1, for `TokenAdvantages`; 0 outside the mask. A batch of
        equal returns gives 0.
    """
    returns = reward_to_go(token_rewards, loss_mask, sequences, discount=config.discount)
    return whitened(returns, loss_mask.to(returns.dtype))


def reinforce_plus_plus_baseline_advantages(
    rewards: Float[Tensor, " samples"],
    group_ids: Int[Tensor, " samples"],
    num_tokens: Int[Tensor, " samples"],
    *,
    accepted: Bool[Tensor, " samples"] | None = None,
) -> Float[Tensor, " samples"]:
    """Rewards centred within their group, then whitened over the batch's tokens.

    Args:
        rewards: one per sample of *everything* that one optimizer step looks at; NaN or infinite
            where there is none.
        group_ids: equal for the samples of one prompt.
        num_tokens: tokens in each sample's loss mask: each weighs once in mean and variance.
        accepted: as in `grpo_advantages`.

    Returns:
        One advantage per sample, unit 1, float32 or better; always finite. A sample that is not
        scored, or has no token, gets 0 and stays out of mean and variance; a group of one or of
        equal rewards counts as 0 before whitening.
    """
    groups = grouped(rewards, group_ids, accepted)
    check_per_sample("num_tokens", num_tokens, like=rewards)
    centred = groups.weighted_centre()
    return whitened(centred, num_tokens.to(centred.dtype) * groups.scored.to(centred.dtype))
