"""Correcting for the sampler having drawn from a slightly different policy.

The mismatch ratio ``exp(proximal - rollout)`` holds two programs' numerics, plus staleness if
there is any. There are two ways to treat it, and they are types, so that a setting of one cannot
be given to the other:

    decoupled   three policies: the clip looks at policy / proximal, and a weight made of
                proximal / rollout multiplies the loss. `TokenTruncation`, `SequenceTruncation`,
                `WeightMasking`: they differ in what a weight belongs to, and in what becomes of
                weights that are too large.
    bypass      two policies: the sampler's log-probabilities stand in for the proximal ones, so
                the clip looks at policy / rollout and bounds mismatch and staleness together.
                `Bypass`, which has no weight and hence no setting.

Rejecting tokens or sequences outright, before they are counted, is `rejection`.

Sources: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(fengyao.notion.site/off-policy-rl): truncated importance sampling (TIS). Liu et al. 2025, "When
Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
(richardli.xyz/rl-collapse): sequence-level weights, masked importance sampling (MIS), geometric
means. Ling Team 2025, "Every Step Evolves", arXiv:2510.18855: IcePop, token-level masking.
"""

import math
from typing import ClassVar, Literal, NamedTuple, assert_never, final

import attrs
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.precision import at_least_float32
from algos_gspo_dapo_grpo.sequences import Sequences
from algos_gspo_dapo_grpo.shapes import check_one_shape
from algos_gspo_dapo_grpo.surrogate import LOG_RATIO_CAP

RatioLevel = Literal["token", "sequence", "geometric"]
"""What a mismatch ratio belongs to: a token; a sequence, as the product of its tokens' ratios; or
a sequence, as their geometric mean, whose scale does not depend on the length."""

RATIO_LEVELS = ("token", "sequence", "geometric")

_CAP_VALIDATORS = [attrs.validators.ge(1.0), attrs.validators.le(math.exp(LOG_RATIO_CAP))]


@final
@attrs.frozen(kw_only=True)
class TokenTruncation:
    """Token-level truncated importance weights, ``min(exp(proximal - rollout), cap)`` (TIS)."""

    kind: ClassVar[Literal["token_truncation"]] = "token_truncation"

    cap: float = attrs.field(default=2.0, validator=_CAP_VALIDATORS)
    """Largest weight. Default: 2, as verl and ms-swift have it.

    At least 1, since less would shrink tokens on which the two policies agree, and at most
    exp(20), where log ratios are held.
    """


@final
@attrs.frozen(kw_only=True)
class SequenceTruncation:
    """Truncated importance weights that all tokens of a sequence share."""

    kind: ClassVar[Literal["sequence_truncation"]] = "sequence_truncation"

    level: Literal["sequence", "geometric"] = attrs.field(
        default="sequence", validator=attrs.validators.in_(("sequence", "geometric"))
    )
    """Product of the tokens' ratios, or their geometric mean. Default: the product, unbiased."""

    cap: float = attrs.field(default=2.0, validator=_CAP_VALIDATORS)
    """Largest weight; from 1 to exp(20). Default: 2, as verl has it."""


@final
@attrs.frozen(kw_only=True)
class WeightMasking:
    """Importance weights that are 0 outside a band, and untouched inside (IcePop, MIS).

    A token of weight 0 adds nothing to the loss and still counts in its denominator, as in
    arXiv:2510.18855.
    """

    kind: ClassVar[Literal["weight_masking"]] = "weight_masking"

    level: RatioLevel = attrs.field(default="token", validator=attrs.validators.in_(RATIO_LEVELS))
    """Default: token, IcePop. MIS: ``level="sequence", low=0.0, high=2.0``."""

    low: float = attrs.field(
        default=0.5, validator=[attrs.validators.ge(0.0), attrs.validators.lt(1.0)]
    )
    """Smallest weight that is kept; below 1. Default: IcePop's 0.5."""

    high: float = attrs.field(
        default=5.0,
        validator=[attrs.validators.gt(1.0), attrs.validators.lt(math.exp(LOG_RATIO_CAP))],
    )
    """Largest weight that is kept; above 1. Default: IcePop's 5."""


@final
@attrs.frozen(kw_only=True)
class Bypass:
    """The sampler's log-probabilities are the proximal ones; nothing to set.

    `policy_loss` then takes `rollout_logprobs` and no `proximal_logprobs`, which saves the
    trainer a forward pass. A token for which the sampler reported nothing has ratio 1.
    """

    kind: ClassVar[Literal["bypass"]] = "bypass"


ImportanceWeighting = TokenTruncation | SequenceTruncation | WeightMasking
"""The decoupled ways: weights made of proximal / rollout."""

RolloutCorrection = TokenTruncation | SequenceTruncation | WeightMasking | Bypass
"""What is done about the mismatch."""


class CorrectionWeights(NamedTuple):
    """Weights per token, and where the bound of the configuration decided them."""

    weights: Float[Tensor, "*layout"]
    """Without gradient; 1 outside the mask."""

    bounded: Bool[Tensor, "*layout"]
    """True where the weight was cut to its cap, or set to 0."""

    of_sequences: Float[Tensor, " sequences"] | None
    """The same weights, one per sequence, where a sequence's tokens share theirs; else None."""


def correction_weights(
    proximal_logprobs: Float[Tensor, "*layout"],
    rollout_logprobs: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    config: ImportanceWeighting,
) -> CorrectionWeights:
    """Importance weight of each token by the formula that `config` names.

    Args:
        proximal_logprobs: computed by the trainer, in nats; NaN on the mask shows.
        rollout_logprobs: reported by the sampler, in nats. A token without a finite one has the
            ratio 1, by itself and within its sequence.
        loss_mask: True on the sampled tokens.
        sequences: boundaries, for the sequence levels.
        config: which weights.
    """
    level: RatioLevel = "token" if isinstance(config, TokenTruncation) else config.level
    of_tokens = log_mismatch_ratio(
        proximal_logprobs, rollout_logprobs, loss_mask, sequences, level="token"
    )
    if level == "token":
        weights, bounded = _bounded(of_tokens, config)
        return CorrectionWeights(weights, bounded, None)
    of_sequences = _of_sequences(of_tokens, loss_mask, sequences, level=level)
    weights, bounded = _bounded(of_sequences, config)
    at_bound = sequences.spread(bounded.to(weights.dtype)) > 0
    return CorrectionWeights(
        weights=torch.where(loss_mask, sequences.spread(weights), 1.0),
        bounded=loss_mask & at_bound,
        of_sequences=weights,
    )


def _bounded(log_ratio: Tensor, config: ImportanceWeighting) -> tuple[Tensor, Tensor]:
    """Weights, and where the configuration's bound decided them."""
    ratio = torch.exp(torch.clamp(log_ratio, -LOG_RATIO_CAP, LOG_RATIO_CAP))
    match config:
        case TokenTruncation() | SequenceTruncation():
            return ratio.clamp(max=config.cap), ratio >= config.cap
        case WeightMasking():
            outside = (ratio < config.low) | (ratio > config.high)
            return torch.where(outside, 0.0, ratio), outside
        case _:
            assert_never(config)


def log_mismatch_ratio(
    proximal_logprobs: Float[Tensor, "*layout"],
    rollout_logprobs: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    level: RatioLevel,
) -> Float[Tensor, "*layout"]:
    """``proximal - rollout`` of each token, or of its sequence, in nats, without gradient.

    0 outside the mask, at the token level and at gaps of the sampler; the geometric mean is over
    the tokens of the mask, gaps included.
    """
    check_one_shape(
        "rollout correction",
        proximal_logprobs=proximal_logprobs,
        rollout_logprobs=rollout_logprobs,
        loss_mask=loss_mask,
        sequences=sequences.sequence_ids,
    )
    rollout = at_least_float32(rollout_logprobs.detach())
    known = loss_mask & torch.isfinite(rollout)
    log_ratio = torch.where(known, at_least_float32(proximal_logprobs.detach()) - rollout, 0.0)
    if level == "token":
        return log_ratio
    whole = _of_sequences(log_ratio, loss_mask, sequences, level=level)
    return torch.where(loss_mask, sequences.spread(whole), 0.0)


def _of_sequences(
    log_ratio: Tensor,
    loss_mask: Tensor,
    sequences: Sequences,
    *,
    level: Literal["sequence", "geometric"],
) -> Tensor:
    """The log ratio of each sequence, of those of its tokens."""
    whole = sequences.sum(log_ratio)
    match level:
        case "sequence":
            return whole
        case "geometric":
            return whole / sequences.sum(loss_mask.to(log_ratio.dtype)).clamp(min=1.0)
        case _:
            assert_never(level)


def effective_sample_fraction(weight_mean: float, weight_square_mean: float) -> float:
    """Effective sample size over the number of tokens, ``mean(w)^2 / mean(w^2)``, from 0 to 1.

    Takes the batch's ``correction/weight/mean`` and ``correction/weight_square/mean``: these are
    shares and add up over micro-batches and ranks, which their quotient does not. 0 if every
    weight is 0.

    Source: Kish 1965, "Survey Sampling", section 11.7.
    """
    return 0.0 if weight_square_mean == 0.0 else weight_mean**2 / weight_square_mean
