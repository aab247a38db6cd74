"""TOPR: plain REINFORCE on good samples, tapered importance weights on bad ones.

Off-policy, pushing down a bad sample that the policy has already forgotten only does harm; its
weight falls with its probability. A good one is pulled up however unlikely it has become.

Source: Le Roux et al. 2025, "Tapered Off-Policy REINFORCE: Stable and efficient reinforcement
learning for LLMs", arXiv:2503.14286.
"""

from typing import ClassVar, Literal, final

import attrs
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.aggregation import Aggregation, SequenceMeanTokenSum
from algos_gspo_dapo_grpo.kl import KlPenalty
from algos_gspo_dapo_grpo.rollout_correction import RolloutCorrection
from algos_gspo_dapo_grpo.sequences import Sequences
from algos_gspo_dapo_grpo.surrogate import (
    Surrogate,
    masked_log_ratio,
    masked_logprobs,
    ratio_of,
)


@final
@attrs.frozen(kw_only=True)
class ToprLoss:
    """The TOPR loss. Its ratio is that of the whole sequence, and its bounds are the method."""

    kind: ClassVar[Literal["topr"]] = "topr"

    aggregation: Aggregation = attrs.field(factory=SequenceMeanTokenSum)
    """How token losses become one number. Default: the paper's log-probability of a sequence."""

    kl: KlPenalty | None = None
    """KL term against a reference policy. Default: none, as in the paper."""

    rollout_correction: RolloutCorrection | None = None
    """What is done about the sampler's mismatch. None: nothing, as in the paper."""


def topr_token_losses(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, " sequences"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    config: ToprLoss,
) -> Surrogate:
    """``-sg(w) * A * log pi`` per token, w = 1 where A >= 0, else min(pi / mu, 1) of the sequence.

    Args:
        policy_logprobs: log pi_theta(y_t), in nats; the only input that carries a gradient.
        proximal_logprobs: log mu(y_t), in nats, of the policy that the data are judged against:
            the one that sampled, with `Bypass`.
        advantages: one per sequence, in reward units; the paper's reward, or reward less a
            baseline.
        loss_mask: True on the sampled tokens.
        sequences: boundaries of the sequences.
        config: nothing that acts here; the aggregation is `policy_loss`'s business.

    Returns:
        For each token its loss and the ratio of its sequence; `clipped` is where the ratio of a
        bad sample was cut to 1. The value is no objective: only its gradient has a meaning.
    """
    del config
    policy = masked_logprobs(policy_logprobs, loss_mask)
    log_ratio = masked_log_ratio(policy, proximal_logprobs, loss_mask)
    ratios = ratio_of(sequences.sum(log_ratio)).detach()
    bad = advantages < 0
    weights = torch.where(bad, ratios.clamp(max=1.0), 1.0)
    return Surrogate(
        losses=sequences.spread(-(weights * advantages.detach())) * policy,
        ratios=sequences.spread(ratios),
        clipped=(sequences.spread((bad & (ratios > 1.0)).to(ratios.dtype)) > 0) & loss_mask,
        dual_clipped=None,
    )
