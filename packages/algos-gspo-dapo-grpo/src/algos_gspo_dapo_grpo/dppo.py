"""DPPO: tokens leave the loss by how far their probability moved, not by their ratio.

A ratio says little about the distance of two policies: it is noisy for rare tokens and blind for
likely ones. Here a token that would be pushed further away is left out once the divergence of the
two-outcome distributions (this token, any other) exceeds a threshold.

Source: Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning",
arXiv:2602.04879; bound of the weight: section 5.4. The paper measures against the policy that
sampled, which is ``rollout_correction=Bypass()``.
"""

import math
from typing import ClassVar, Literal, final

import attrs
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.aggregation import Aggregation, TokenMean
from algos_gspo_dapo_grpo.kl import KlPenalty
from algos_gspo_dapo_grpo.rollout_correction import RolloutCorrection
from algos_gspo_dapo_grpo.surrogate import (
    LOG_RATIO_CAP,
    Surrogate,
    masked_log_ratio,
    masked_logprobs,
    ratio_of,
)
from algos_gspo_dapo_grpo.validators import positive_validator

BINARY_KL_EPSILON = 1e-8
"""Added to probabilities of "any other token" before the logarithm. verl's value."""

_MAX_RATIO_VALIDATORS = [attrs.validators.ge(1.0), attrs.validators.le(math.exp(LOG_RATIO_CAP))]


@final
@attrs.frozen(kw_only=True)
class DppoTvLoss:
    """DPPO with the total variation, ``|pi - pi_old|`` of the sampled token."""

    kind: ClassVar[Literal["dppo_tv"]] = "dppo_tv"

    threshold_low: float = attrs.field(
        default=0.2, validator=[attrs.validators.gt(0.0), attrs.validators.lt(1.0)]
    )
    """Largest fall in probability where A <= 0; below 1. Default: SkyRL's and verl's 0.2."""

    threshold_high: float = attrs.field(
        default=0.2, validator=[attrs.validators.gt(0.0), attrs.validators.lt(1.0)]
    )
    """Largest rise in probability where A > 0; below 1. Default: SkyRL's and verl's 0.2."""

    max_ratio: float = attrs.field(default=20.0, validator=_MAX_RATIO_VALIDATORS)
    """Bound of the detached weight (section 5.4); from 1 to exp(20). Default: verl's 20."""

    aggregation: Aggregation = attrs.field(factory=TokenMean)
    """How token losses become one number. Default: as verl."""

    kl: KlPenalty | None = None
    """KL term against a reference policy. Default: none, as in the paper."""

    rollout_correction: RolloutCorrection | None = None
    """What is done about the sampler's mismatch. None: nothing."""


@final
@attrs.frozen(kw_only=True)
class DppoKlLoss:
    """DPPO with the KL divergence of (this token, any other), KL(pi_old || pi)."""

    kind: ClassVar[Literal["dppo_kl"]] = "dppo_kl"

    threshold_low: float = attrs.field(default=0.05, validator=positive_validator)
    """Largest divergence of a falling token where A <= 0, in nats. Default: SkyRL's 0.05."""

    threshold_high: float = attrs.field(default=0.05, validator=positive_validator)
    """Largest divergence of a rising token where A > 0, in nats. Default: SkyRL's 0.05."""

    max_ratio: float = attrs.field(default=20.0, validator=_MAX_RATIO_VALIDATORS)
    """Bound of the detached weight (section 5.4); from 1 to exp(20). Default: verl's 20."""

    aggregation: Aggregation = attrs.field(factory=TokenMean)
    """How token losses become one number. Default: as verl."""

    kl: KlPenalty | None = None
    """KL term against a reference policy. Default: none, as in the paper."""

    rollout_correction: RolloutCorrection | None = None
    """What is done about the sampler's mismatch. None: nothing."""


def dppo_token_losses(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    *,
    config: DppoTvLoss | DppoKlLoss,
) -> Surrogate:
    """``-sg(min(r, max_ratio)) * A * log pi`` per token inside the trust region, 0 outside.

    Args:
        policy_logprobs: log pi_theta(y_t), in nats, at most 0; the only input that carries a
            gradient.
        proximal_logprobs: log pi_old(y_t), in nats, at most 0.
        advantages: one per token, in reward units.
        loss_mask: True on the sampled tokens.
        config: divergence and thresholds.

    Returns:
        Losses to minimise, one per token; `clipped` is where the token was left out. The value is
        no objective: only its gradient has a meaning.
    """
    policy = masked_logprobs(policy_logprobs, loss_mask)
    proximal = masked_logprobs(proximal_logprobs.detach(), loss_mask).to(policy.dtype)
    ratios = ratio_of(masked_log_ratio(policy, proximal, loss_mask)).detach()
    # Positive log-probabilities exist by rounding only; exp must not overflow for them either.
    probability = torch.exp(policy.detach().clamp(max=0.0))
    proximal_probability = torch.exp(proximal.clamp(max=0.0))
    rises = probability > proximal_probability
    falls = probability < proximal_probability
    if isinstance(config, DppoTvLoss):
        distance = (probability - proximal_probability).abs()
    else:
        distance = proximal_probability * (proximal - policy.detach()) + (
            1.0 - proximal_probability
        ) * torch.log(
            (1.0 - proximal_probability + BINARY_KL_EPSILON)
            / (1.0 - probability + BINARY_KL_EPSILON)
        )
    left_out = torch.where(
        advantages > 0,
        rises & (distance > config.threshold_high),
        falls & (distance > config.threshold_low),
    )
    weights = torch.where(left_out, 0.0, ratios.clamp(max=config.max_ratio))
    return Surrogate(
        losses=-(weights * advantages.detach()) * policy,
        ratios=ratios,
        clipped=left_out,
        dual_clipped=None,
    )
