"""GSPO-token: the sequence's ratio with a gradient and an advantage for each token.

Source: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071, section 4.3,
eq. 13 and 14.
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
from algos_gspo_dapo_grpo.surrogate import (
    Surrogate,
    clipped_surrogate,
    masked_log_ratio,
    masked_logprobs,
)
from algos_gspo_dapo_grpo.validators import clip_high_validator, clip_low_validator


@final
@attrs.frozen(kw_only=True)
class GspoTokenLoss:
    """The GSPO-token loss; it is GSPO where all tokens of a sequence share their advantage."""

    kind: ClassVar[Literal["gspo_token"]] = "gspo_token"

    clip_low: float = attrs.field(default=3e-4, validator=clip_low_validator)
    """Lower clip: the ratio is held at or above ``1 - clip_low`` (paper, section 5.1)."""

    clip_high: float = attrs.field(default=4e-4, validator=clip_high_validator)
    """Upper clip: the ratio is held at or below ``1 + clip_high`` (paper, section 5.1)."""

    aggregation: Aggregation = attrs.field(factory=SequenceMeanTokenMean)
    """How token losses become one number. Default: the paper's, eq. 13."""

    kl: KlPenalty | None = None
    """KL term against a reference policy. Default: none, as in the paper."""

    rollout_correction: RolloutCorrection | None = None
    """What is done about the sampler's mismatch. None: nothing, as in the paper."""


def gspo_token_losses(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    config: GspoTokenLoss,
) -> Surrogate:
    """Per-token clipped surrogate of GSPO-token (arXiv:2507.18071, eq. 13 and 14).

    The value of a token's ratio is the geometric mean of its sequence's ratios; its gradient is
    that of the token's own log-probability.

    Args:
        policy_logprobs: log pi_theta(y_t), in nats; the only input that carries a gradient.
        proximal_logprobs: log pi_old(y_t), in nats, computed by the trainer.
        advantages: one per token, in reward units.
        loss_mask: True on the sampled tokens. The ratio is 1 outside of it.
        sequences: boundaries of the sequences.
        config: clip range.

    Returns:
        Losses to minimise, one per token, not yet masked.
    """
    log_ratio = masked_log_ratio(at_least_float32(policy_logprobs), proximal_logprobs, loss_mask)
    num_tokens = sequences.sum(loss_mask.to(log_ratio.dtype)).clamp(min=1.0)
    of_sequence = sequences.spread(sequences.sum(log_ratio.detach()) / num_tokens)
    # The token's own part is exactly 0 and has its gradient.
    own = masked_logprobs(policy_logprobs, loss_mask)
    return clipped_surrogate(
        of_sequence + (own - own.detach()),
        advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
