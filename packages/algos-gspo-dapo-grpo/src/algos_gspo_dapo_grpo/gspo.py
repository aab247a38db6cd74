"""GSPO: the clipped surrogate with one importance ratio per sequence.

Source: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071, eq. 5 to 7.
"""

from typing import ClassVar, Literal, final

import attrs
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.aggregation import Aggregation, SequenceMeanTokenMean
from algos_gspo_dapo_grpo.kl import KlPenalty
from algos_gspo_dapo_grpo.precision import at_least_float32
from algos_gspo_dapo_grpo.rollout_correction import RolloutCorrection
from algos_gspo_dapo_grpo.sequences import Sequences
from algos_gspo_dapo_grpo.surrogate import Surrogate, clipped_surrogate, masked_log_ratio
from algos_gspo_dapo_grpo.validators import clip_high_validator, clip_low_validator


@final
@attrs.frozen(kw_only=True)
class GspoLoss:
    """The GSPO loss."""

    kind: ClassVar[Literal["gspo"]] = "gspo"

    clip_low: float = attrs.field(default=3e-4, validator=clip_low_validator)
    """Lower clip: the ratio is held at or above ``1 - clip_low`` (paper, section 5.1)."""

    clip_high: float = attrs.field(default=4e-4, validator=clip_high_validator)
    """Upper clip: the ratio is held at or below ``1 + clip_high`` (paper, section 5.1)."""

    aggregation: Aggregation = attrs.field(factory=SequenceMeanTokenMean)
    """How losses become one number. Default: the plain mean over sequences of eq. 5.

    Each token of a sequence carries the sequence's loss. The token mean therefore weighs
    sequences by their length, and the token sums multiply by it: all four kinds act.
    """

    kl: KlPenalty | None = None
    """KL term against a reference policy. Default: none; the paper leaves it out of eq. 5."""

    rollout_correction: RolloutCorrection | None = None
    """What is done about the sampler's mismatch. None: nothing, as in the paper."""


def gspo_sequence_losses(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, " sequences"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    config: GspoLoss,
) -> Surrogate:
    """Per-sequence clipped surrogate of GSPO (arXiv:2507.18071, eq. 5).

    The ratio is the geometric mean of the token ratios (eq. 7), so its scale does not depend on
    the length, and one wild token does not clip its sequence while the mean stays in the range.

    Args:
        policy_logprobs: log pi_theta(y_t), in nats; the only input that carries a gradient,
            which reaches every token of the mask.
        proximal_logprobs: log pi_old(y_t), in nats, computed by the trainer.
        advantages: one per sequence, in reward units.
        loss_mask: True on the sampled tokens. A sequence without any has ratio 1 and no gradient;
            leaving it out of the mean is the caller's.
        sequences: boundaries of the sequences.
        config: clip range.

    Returns:
        Losses to minimise, one per sequence.
    """
    log_ratio = masked_log_ratio(at_least_float32(policy_logprobs), proximal_logprobs, loss_mask)
    num_tokens = sequences.sum(loss_mask.to(log_ratio.dtype)).clamp(min=1.0)
    return clipped_surrogate(
        sequences.sum(log_ratio) / num_tokens,
        advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
