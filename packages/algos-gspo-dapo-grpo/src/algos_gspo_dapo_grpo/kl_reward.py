"""A KL term in the reward, and a coefficient that follows a target.

In the reward the term is part of what advantages are made of, and has no gradient of its own; in
the loss (`kl.KlPenalty`) it has. A run has one or the other.

Sources: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences",
arXiv:1909.08593, section 2.2, for the term per token and the adaptive coefficient.
"""

import math
from typing import ClassVar, Literal, assert_never, final

import attrs
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.kl import KL_ESTIMATORS, KlEstimator, kl_estimate
from algos_gspo_dapo_grpo.shapes import check_one_shape
from algos_gspo_dapo_grpo.validators import positive_validator

KL_ERROR_BOUND = 0.2
"""The relative error of the KL is held in ``[-0.2, 0.2]`` (arXiv:1909.08593, section 2.2)."""


@final
@attrs.frozen(kw_only=True)
class FixedKlCoefficient:
    """A coefficient that stays what it is."""

    kind: ClassVar[Literal["fixed"]] = "fixed"

    value: float = attrs.field(validator=positive_validator)
    """In reward units per nat."""


@final
@attrs.frozen(kw_only=True)
class AdaptiveKlCoefficient:
    """A coefficient that grows while the KL is above its target, and shrinks below it."""

    kind: ClassVar[Literal["adaptive"]] = "adaptive"

    initial: float = attrs.field(validator=positive_validator)
    """Of the first step, in reward units per nat."""

    target: float = attrs.field(validator=positive_validator)
    """The KL to hold, in nats, over the same units as what is observed (tokens or sequences)."""

    horizon: float = attrs.field(default=10_000.0, validator=positive_validator)
    """Samples after which an error of one target changes the coefficient by its own size.

    The paper's K is the samples of a step over the horizon, 0.1 there. Default: verl's.
    """


KlCoefficient = FixedKlCoefficient | AdaptiveKlCoefficient
"""How much a nat costs."""


def initial_kl_coefficient(config: KlCoefficient) -> float:
    """The coefficient of the first step, in reward units per nat."""
    match config:
        case FixedKlCoefficient():
            return config.value
        case AdaptiveKlCoefficient():
            return config.initial
        case _:
            assert_never(config)


def next_kl_coefficient(
    coefficient: float, observed_kl: float, *, num_samples: int, config: KlCoefficient
) -> float:
    """The coefficient of the next step (arXiv:1909.08593, section 2.2).

    Args:
        coefficient: of the step just done, which is all the state there is; a checkpoint keeps
            this one number.
        observed_kl: mean KL of that step, over the whole batch, in nats.
        num_samples: samples of that step.
        config: fixed or adaptive.

    Returns:
        In reward units per nat; never below 0.

    Raises:
        ValueError: if the observed KL is not finite, which no coefficient can answer.
    """
    match config:
        case FixedKlCoefficient():
            return config.value
        case AdaptiveKlCoefficient():
            if not math.isfinite(observed_kl):
                raise ValueError(
                    f"next_kl_coefficient: expected a finite observed_kl, got {observed_kl}; the "
                    "step's log-probabilities held NaN or infinity"
                )
            error = observed_kl / config.target - 1.0
            error = min(max(error, -KL_ERROR_BOUND), KL_ERROR_BOUND)
            return max(coefficient * (1.0 + error * num_samples / config.horizon), 0.0)
        case _:
            assert_never(config)


@final
@attrs.frozen(kw_only=True)
class KlInReward:
    """A KL term per token that is taken off the reward."""

    coefficient: KlCoefficient
    """Fixed or adaptive."""

    estimator: KlEstimator = attrs.field(
        default="k1", validator=attrs.validators.in_(KL_ESTIMATORS)
    )
    """Which estimator. Default: k1, the paper's log ratio; it needs no gradient here."""


def kl_penalised_rewards(
    token_rewards: Float[Tensor, "*layout"],
    policy_logprobs: Float[Tensor, "*layout"],
    ref_logprobs: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    *,
    coefficient: float,
    config: KlInReward,
) -> Float[Tensor, "*layout"]:
    """``reward - coefficient * KL estimate`` per token (arXiv:1909.08593, section 2.2).

    Args:
        token_rewards: in reward units; `outcome_token_rewards` makes them of one per sequence.
        policy_logprobs: of the policy that sampled, or at the start of the step, in nats.
        ref_logprobs: under the frozen reference, in nats.
        loss_mask: True on the sampled tokens.
        coefficient: the present one; see `next_kl_coefficient`.
        config: which estimator.

    Returns:
        In reward units, without gradient; 0 outside the mask. For `reward_to_go` and `gae`;
        added up per sequence (`Sequences.sum`) it is the reward that group advantages take.
    """
    check_one_shape(
        "kl_penalised_rewards",
        token_rewards=token_rewards,
        policy_logprobs=policy_logprobs,
        loss_mask=loss_mask,
    )
    penalty = kl_estimate(
        policy_logprobs.detach(), ref_logprobs.detach(), estimator=config.estimator
    )
    return torch.where(loss_mask, token_rewards.detach() - coefficient * penalty, 0.0)
