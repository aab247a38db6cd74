"""GRPO: the clipped surrogate with one importance ratio per token.

Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.1, eq. 3.
"""

from typing import ClassVar, Literal, final

import attrs
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.aggregation import Aggregation, SequenceMeanTokenMean
from algos_gspo_dapo_grpo.kl import KlPenalty
from algos_gspo_dapo_grpo.precision import at_least_float32
from algos_gspo_dapo_grpo.rollout_correction import RolloutCorrection
from algos_gspo_dapo_grpo.surrogate import Surrogate, clipped_surrogate, masked_log_ratio
from algos_gspo_dapo_grpo.validators import (
    clip_high_validator,
    clip_low_validator,
    dual_clip_validator,
)


@final
@attrs.frozen(kw_only=True)
class GrpoLoss:
    """The GRPO loss, and its relatives that differ in clip range, mean or KL term only."""

    kind: ClassVar[Literal["grpo"]] = "grpo"

    clip_low: float = attrs.field(default=0.2, validator=clip_low_validator)
    """Lower clip: the ratio is held at or above ``1 - clip_low``.

    Default: PPO's (arXiv:1707.06347, section 6.1); the GRPO paper names no value.
    """

    clip_high: float = attrs.field(default=0.2, validator=clip_high_validator)
    """Upper clip: the ratio is held at or below ``1 + clip_high``. Default: as `clip_low`."""

    dual_clip: float | None = attrs.field(default=None, validator=dual_clip_validator)
    """Bound of the loss, in units of |A|, where A < 0 (arXiv:1912.09729; 3 there). None: none."""

    aggregation: Aggregation = attrs.field(factory=SequenceMeanTokenMean)
    """How token losses become one number. Default: the paper's, eq. 3."""

    kl: KlPenalty | None = None
    """KL term against a reference policy.

    The paper has ``KlPenalty(coefficient=0.04)`` (section 4.2). Default: none, as DAPO argues
    for long reasoning (arXiv:2503.14476, section 2.3), and no reference model to hold.
    """

    rollout_correction: RolloutCorrection | None = None
    """What is done about the sampler's mismatch. None: nothing, as in the paper."""


def grpo_token_losses(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    *,
    config: GrpoLoss,
) -> Surrogate:
    """Per-token clipped surrogate of GRPO (arXiv:2402.03300, eq. 3, without its KL term).

    Args:
        policy_logprobs: log pi_theta(y_t), in nats; the only input that carries a gradient.
        proximal_logprobs: log pi_old(y_t), in nats, computed by the trainer.
        advantages: one per token, in reward units; `Sequences.spread` makes them of one per
            sequence.
        loss_mask: True on the sampled tokens. The ratio is 1 outside of it.
        config: clip range; its aggregation, KL and correction are `policy_loss`'s business.

    Returns:
        Losses to minimise, one per token, not yet masked.
    """
    return clipped_surrogate(
        masked_log_ratio(at_least_float32(policy_logprobs), proximal_logprobs, loss_mask),
        advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
