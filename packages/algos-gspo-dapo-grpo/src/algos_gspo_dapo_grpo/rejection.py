"""Rejecting tokens or sequences on which trainer and sampler differ too much.

What is rejected leaves the loss mask, before anything is counted: it is in no denominator and,
as a whole sequence, in no baseline (`accepted` of the advantage functions). So this runs once per
step, between the trainer's start-of-step log-probabilities and `count_batch`:

    loss_mask ──▶ kept_mask ──▶ accepted_sequences ──▶ advantages
                      └───────▶ count_batch ──▶ policy_loss

Source: Liu et al. 2025, "When Speed Kills Stability", richardli.xyz/rl-collapse; the veto as in
earlier verl releases' rollout correction.
"""

import math
from typing import final

import attrs
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.rollout_correction import RATIO_LEVELS, RatioLevel, log_mismatch_ratio
from algos_gspo_dapo_grpo.sequences import Sequences


@final
@attrs.frozen(kw_only=True)
class RatioBand:
    """Keep what has its mismatch ratio within a band."""

    level: RatioLevel = attrs.field(validator=attrs.validators.in_(RATIO_LEVELS))
    """What is kept or rejected by its ratio: single tokens, or sequences by the product or the
    geometric mean of their tokens' ratios."""

    low: float = attrs.field(validator=[attrs.validators.ge(0.0), attrs.validators.lt(1.0)])
    """Smallest ratio that is kept; below 1. verl's default is the inverse of its upper bound."""

    high: float = attrs.field(validator=attrs.validators.gt(1.0))
    """Largest ratio that is kept; above 1. Infinity for no upper bound."""

    @high.validator
    def _does_something(self, _: object, value: float) -> None:
        if self.low == 0.0 and value == math.inf:
            raise ValueError(
                "RatioBand: expected a lower bound above 0, a finite upper bound or both, got low "
                "0 and high infinity, which keeps everything; leave the band out"
            )


@final
@attrs.frozen(kw_only=True)
class Rejection:
    """What is rejected. At least one of the two is set."""

    band: RatioBand | None = None
    """Reject outside a band of ratios. None: no such rejection."""

    veto: float | None = attrs.field(
        default=None,
        validator=attrs.validators.optional([attrs.validators.gt(0.0), attrs.validators.lt(1.0)]),
    )
    """Reject a whole sequence if one of its tokens has a ratio below this. None: no veto.

    Such a token was drawn by the sampler and is nearly impossible to the trainer. Earlier
    verl releases' examples have 1e-4.
    """

    @veto.validator
    def _does_something(self, _: object, value: float | None) -> None:
        if value is None and self.band is None:
            raise ValueError(
                "Rejection: expected a band, a veto or both, got neither, which rejects nothing; "
                "for no rejection leave the Rejection itself out"
            )


def kept_mask(
    proximal_logprobs: Float[Tensor, "*layout"],
    rollout_logprobs: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    config: Rejection,
) -> Bool[Tensor, "*layout"]:
    """The loss mask less what is rejected.

    Args:
        proximal_logprobs: computed by the trainer, in nats.
        rollout_logprobs: reported by the sampler, in nats. A token without a finite one is never
            a reason to reject.
        loss_mask: True on the sampled tokens.
        sequences: boundaries of the sequences.
        config: what to reject.

    Returns:
        A loss mask; band and veto are judged on the mask as it was given. A NaN in
        `proximal_logprobs` is kept, so that it shows.
    """
    kept = loss_mask
    if config.band is not None:
        log_ratio = log_mismatch_ratio(
            proximal_logprobs, rollout_logprobs, loss_mask, sequences, level=config.band.level
        )
        low = math.log(config.band.low) if config.band.low > 0 else -math.inf
        kept = kept & ~(log_ratio < low) & ~(log_ratio > math.log(config.band.high))
    if config.veto is not None:
        log_ratio = log_mismatch_ratio(
            proximal_logprobs, rollout_logprobs, loss_mask, sequences, level="token"
        )
        vetoes = sequences.sum((log_ratio < math.log(config.veto)).to(log_ratio.dtype))
        kept = kept & (sequences.spread(vetoes) == 0)
    return kept


def accepted_sequences(
    loss_mask: Bool[Tensor, "*layout"], sequences: Sequences
) -> Bool[Tensor, " sequences"]:
    """True for sequences with a token in the mask: the `accepted` of the advantage functions."""
    return sequences.sum(loss_mask.to(torch.float32)) > 0
