"""SAPO: a smooth gate on the ratio instead of a clip, narrower where the advantage is negative.

Source: Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347, section 3,
eq. 5 and 6.
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
from algos_gspo_dapo_grpo.surrogate import Surrogate, masked_log_ratio, ratio_of
from algos_gspo_dapo_grpo.validators import positive_validator


@final
@attrs.frozen(kw_only=True)
class SapoLoss:
    """The SAPO loss."""

    kind: ClassVar[Literal["sapo"]] = "sapo"

    temperature_positive: float = attrs.field(default=1.0, validator=positive_validator)
    """Steepness of the gate where A > 0, the paper's tau_pos. Default: as verl and TRL have it."""

    temperature_negative: float = attrs.field(default=1.05, validator=positive_validator)
    """Steepness of the gate elsewhere, tau_neg; larger decays faster. Default: as verl and TRL."""

    aggregation: Aggregation = attrs.field(factory=SequenceMeanTokenMean)
    """How token losses become one number. Default: the paper's mean over sequences of token
    means."""

    kl: KlPenalty | None = None
    """KL term against a reference policy. Default: none, as in the paper."""

    rollout_correction: RolloutCorrection | None = None
    """What is done about the sampler's mismatch. None: nothing, as in the paper."""


def sapo_token_losses(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    *,
    config: SapoLoss,
) -> Surrogate:
    """``-(4 / tau) * sigmoid(tau * (r - 1)) * A`` per token (arXiv:2511.20347).

    At r = 1 the gate's slope is 1, so the gradient is that of the plain policy gradient, and it
    fades as r leaves 1 to either side.

    Args:
        policy_logprobs: log pi_theta(y_t), in nats; the only input that carries a gradient.
        proximal_logprobs: log pi_old(y_t), in nats, computed by the trainer.
        advantages: one per token, in reward units.
        loss_mask: True on the sampled tokens. The ratio is 1 outside of it.
        config: steepness of the gates.

    Returns:
        Losses to minimise, one per token; nothing is ever clipped.
    """
    ratios = ratio_of(
        masked_log_ratio(at_least_float32(policy_logprobs), proximal_logprobs, loss_mask)
    )
    positive = advantages > 0
    # new_full keeps float64 digits, which torch.where on two Python numbers would not.
    temperature = torch.where(
        positive,
        ratios.new_full((), config.temperature_positive),
        ratios.new_full((), config.temperature_negative),
    )
    gates = torch.sigmoid(temperature * (ratios - 1.0)) * (4.0 / temperature)
    return Surrogate(
        losses=-gates * advantages.detach(),
        ratios=ratios.detach(),
        clipped=torch.zeros_like(positive),
        dual_clipped=None,
    )
