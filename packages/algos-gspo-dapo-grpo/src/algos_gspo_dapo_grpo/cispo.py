"""CISPO: the importance weight is clipped and detached, so every token keeps a gradient.

Source: MiniMax 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning
Attention", arXiv:2506.13585, section 3.1, eq. 4 and 5.
"""

from typing import ClassVar, Literal, final

import attrs
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.aggregation import Aggregation, TokenMean
from algos_gspo_dapo_grpo.kl import KlPenalty
from algos_gspo_dapo_grpo.rollout_correction import RolloutCorrection
from algos_gspo_dapo_grpo.surrogate import (
    Surrogate,
    masked_log_ratio,
    masked_logprobs,
    ratio_of,
)
from algos_gspo_dapo_grpo.validators import clip_high_validator, optional_clip_low_validator


@final
@attrs.frozen(kw_only=True)
class CispoLoss:
    """The CISPO loss.

    With `Bypass` it is also REINFORCE with truncated importance weights against the sampler.
    """

    kind: ClassVar[Literal["cispo"]] = "cispo"

    clip_low: float | None = attrs.field(default=None, validator=optional_clip_low_validator)
    """The weight is held at or above ``1 - clip_low``. Default: no lower bound, as in the
    paper (section 3.1)."""

    clip_high: float = attrs.field(default=4.0, validator=clip_high_validator)
    """The weight is held at or below ``1 + clip_high``.

    The paper names no value. Default: at most 5, ScaleRL's (arXiv:2510.13786, as TRL quotes it).
    """

    aggregation: Aggregation = attrs.field(factory=TokenMean)
    """How token losses become one number. Default: the paper's, eq. 4."""

    kl: KlPenalty | None = None
    """KL term against a reference policy. Default: none, as in the paper."""

    rollout_correction: RolloutCorrection | None = None
    """What is done about the sampler's mismatch. None: nothing, as in the paper."""


def cispo_token_losses(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    *,
    config: CispoLoss,
) -> Surrogate:
    """``-sg(clip(r)) * A * log pi`` per token (arXiv:2506.13585, eq. 4 and 5).

    Args:
        policy_logprobs: log pi_theta(y_t), in nats; the only input that carries a gradient.
        proximal_logprobs: log pi_old(y_t), in nats, computed by the trainer.
        advantages: one per token, in reward units.
        loss_mask: True on the sampled tokens. The ratio is 1 outside of it.
        config: bounds of the weight.

    Returns:
        Losses to minimise, one per token; `clipped` is where the weight was bounded, with its
        gradient alive. The value is no objective: only its gradient has a meaning.
    """
    policy = masked_logprobs(policy_logprobs, loss_mask)
    ratios = ratio_of(masked_log_ratio(policy, proximal_logprobs, loss_mask)).detach()
    low = None if config.clip_low is None else 1.0 - config.clip_low
    weights = torch.clamp(ratios, min=low, max=1.0 + config.clip_high)
    return Surrogate(
        losses=-(weights * advantages.detach()) * policy,
        ratios=ratios,
        clipped=weights != ratios,
        dual_clipped=None,
    )
