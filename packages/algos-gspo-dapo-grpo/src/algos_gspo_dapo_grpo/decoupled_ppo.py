"""Decoupled PPO: the clip looks at the proximal policy, a weight at the one that sampled.

Three policies: the one in training, the proximal one that the clip holds it near to, and the
older one that the sampler used. It is a clipped surrogate whose rollout correction is no option.

Sources: Hilton et al. 2021, "Batch size-invariance for policy optimization", arXiv:2110.00641;
Fu et al. 2025, AReaL, arXiv:2505.24298.
"""

from typing import ClassVar, Literal, final

import attrs
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.aggregation import Aggregation, TokenMean
from algos_gspo_dapo_grpo.kl import KlPenalty
from algos_gspo_dapo_grpo.precision import at_least_float32
from algos_gspo_dapo_grpo.rollout_correction import (
    ImportanceWeighting,
    SequenceTruncation,
    TokenTruncation,
    WeightMasking,
)
from algos_gspo_dapo_grpo.surrogate import Surrogate, clipped_surrogate, masked_log_ratio
from algos_gspo_dapo_grpo.validators import clip_high_validator, clip_low_validator

_AREAL_WEIGHTS = WeightMasking(level="token", low=0.0, high=5.0)


def _weighs_three_policies(_: object, __: object, value: object) -> None:
    if not isinstance(value, TokenTruncation | SequenceTruncation | WeightMasking):
        raise ValueError(  # noqa: TRY004  # a setting out of a file, like the others
            "DecoupledPpoLoss: expected rollout_correction to weigh proximal / rollout "
            f"(TokenTruncation, SequenceTruncation or WeightMasking), got {type(value).__name__}; "
            "with two policies it is GrpoLoss"
        )


@final
@attrs.frozen(kw_only=True)
class DecoupledPpoLoss:
    """The decoupled PPO loss, which needs proximal and rollout log-probabilities."""

    kind: ClassVar[Literal["decoupled_ppo"]] = "decoupled_ppo"

    clip_low: float = attrs.field(default=0.2, validator=clip_low_validator)
    """Lower clip of policy / proximal, as ``1 - clip_low``. Default: PPO's."""

    clip_high: float = attrs.field(default=0.2, validator=clip_high_validator)
    """Upper clip of policy / proximal, as ``1 + clip_high``. Default: PPO's."""

    aggregation: Aggregation = attrs.field(factory=TokenMean)
    """How token losses become one number. Default: as AReaL's code."""

    kl: KlPenalty | None = None
    """KL term against a reference policy. Default: none."""

    rollout_correction: ImportanceWeighting = attrs.field(
        default=_AREAL_WEIGHTS, validator=_weighs_three_policies
    )
    """The weight, proximal / rollout. The papers have it unbounded.

    Default: AReaL's code, which leaves out tokens of a weight above 5.
    """


def decoupled_ppo_token_losses(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    *,
    config: DecoupledPpoLoss,
) -> Surrogate:
    """Per-token clipped surrogate against the proximal policy (arXiv:2505.24298).

    Args:
        policy_logprobs: log pi_theta(y_t), in nats; the only input that carries a gradient.
        proximal_logprobs: log pi_old(y_t), in nats, computed by the trainer.
        advantages: one per token, in reward units.
        loss_mask: True on the sampled tokens. The ratio is 1 outside of it.
        config: clip range; the weight is `policy_loss`'s business.

    Returns:
        Losses to minimise, one per token, not yet weighted nor masked.
    """
    return clipped_surrogate(
        masked_log_ratio(at_least_float32(policy_logprobs), proximal_logprobs, loss_mask),
        advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
