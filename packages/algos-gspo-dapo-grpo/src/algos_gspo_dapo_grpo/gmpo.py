"""GMPO: the geometric mean of token ratios that are clipped one by one.

GSPO clips the mean; GMPO clips in log space what the mean is made of.

Source: Zhao et al. 2025, "Geometric-Mean Policy Optimization", arXiv:2507.20673, section 3,
eq. 3 and 4.
"""

from typing import ClassVar, Literal, final

import attrs
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.aggregation import Aggregation, SequenceMeanTokenMean
from algos_gspo_dapo_grpo.kl import KlPenalty
from algos_gspo_dapo_grpo.precision import at_least_float32
from algos_gspo_dapo_grpo.rollout_correction import RolloutCorrection
from algos_gspo_dapo_grpo.sequences import Sequences
from algos_gspo_dapo_grpo.surrogate import Surrogate, masked_log_ratio, ratio_of
from algos_gspo_dapo_grpo.validators import positive_validator


@final
@attrs.frozen(kw_only=True)
class GmpoLoss:
    """The GMPO loss."""

    kind: ClassVar[Literal["gmpo"]] = "gmpo"

    clip_low: float = attrs.field(default=0.4, validator=positive_validator)
    """Log ratios are held at or above ``-clip_low``, in nats, where A < 0 (paper, section 4)."""

    clip_high: float = attrs.field(default=0.4, validator=positive_validator)
    """Log ratios are held at or below ``clip_high``, in nats, where A > 0 (paper, section 4)."""

    aggregation: Aggregation = attrs.field(factory=SequenceMeanTokenMean)
    """How losses become one number. Default: the paper's plain mean over sequences.

    Each token of a sequence carries the sequence's loss, as for GSPO: all four kinds act.
    """

    kl: KlPenalty | None = None
    """KL term against a reference policy. Default: none, as in the paper."""

    rollout_correction: RolloutCorrection | None = None
    """What is done about the sampler's mismatch. None: nothing, as in the paper."""


def gmpo_sequence_losses(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, " sequences"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    config: GmpoLoss,
) -> Surrogate:
    """``-A * exp(mean over tokens of the clipped log ratio)`` (arXiv:2507.20673, eq. 4).

    Args:
        policy_logprobs: log pi_theta(y_t), in nats; the only input that carries a gradient.
        proximal_logprobs: log pi_old(y_t), in nats, computed by the trainer.
        advantages: one per sequence, in reward units.
        loss_mask: True on the sampled tokens. A sequence without any has ratio 1.
        sequences: boundaries of the sequences.
        config: clip range.

    Returns:
        Loss and ratio of each sequence. `clipped` belongs to tokens: a clipped one adds a constant
        to its sequence's mean and gets no gradient.
    """
    log_ratio = masked_log_ratio(at_least_float32(policy_logprobs), proximal_logprobs, loss_mask)
    sign = torch.sign(sequences.spread(advantages))
    clamped = torch.clamp(log_ratio, -config.clip_low, config.clip_high)
    clipped = sign * clamped < sign * log_ratio
    pessimistic = torch.where(clipped, clamped, log_ratio)
    num_tokens = sequences.sum(loss_mask.to(log_ratio.dtype)).clamp(min=1.0)
    ratios = ratio_of(sequences.sum(pessimistic) / num_tokens)
    return Surrogate(
        losses=-ratios * advantages.detach(),
        ratios=ratios.detach(),
        clipped=clipped,
        dual_clipped=None,
    )
