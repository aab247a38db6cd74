"""Clip-Cov and KL-Cov: hold back the few tokens whose update costs the most entropy.

The entropy falls with the covariance of log-probability and advantage over the batch, and a small
part of the tokens makes up most of it. Clip-Cov takes some of these out of the loss; KL-Cov pulls
the largest towards the proximal policy.

Which tokens is decided once per step over everything that the optimizer step looks at
(`clip_cov_selection`, `kl_cov_selection`), and given to `policy_loss` as `selected_tokens`: means
and ranks of a micro-batch would make the loss depend on how the batch is split.

Source: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language
Models", arXiv:2505.22617, section 4.
"""

from typing import ClassVar, Literal, final

import attrs
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.aggregation import Aggregation, TokenMean
from algos_gspo_dapo_grpo.kl import KlPenalty
from algos_gspo_dapo_grpo.precision import at_least_float32
from algos_gspo_dapo_grpo.rollout_correction import RolloutCorrection
from algos_gspo_dapo_grpo.sequences import Sequences
from algos_gspo_dapo_grpo.surrogate import (
    Surrogate,
    clipped_surrogate,
    masked_log_ratio,
    masked_logprobs,
    ratio_of,
)
from algos_gspo_dapo_grpo.token_advantages import TokenAdvantages, per_token
from algos_gspo_dapo_grpo.validators import (
    clip_high_validator,
    clip_low_validator,
    positive_validator,
)


@final
@attrs.frozen(kw_only=True)
class ClipCovLoss:
    """A clipped surrogate without some tokens of large covariance."""

    kind: ClassVar[Literal["clip_cov"]] = "clip_cov"

    fraction: float = attrs.field(
        default=2e-4, validator=[attrs.validators.gt(0.0), attrs.validators.lt(1.0)]
    )
    """Tokens taken out, as a fraction of the batch's; at least one. Default: verl's, 2e-4."""

    covariance_low: float = 1.0
    """Only tokens of a covariance above this, in nats * reward units. Default: verl's."""

    covariance_high: float = attrs.field(default=5.0)
    """Only tokens of a covariance below this. Default: verl's."""

    clip_low: float = attrs.field(default=0.2, validator=clip_low_validator)
    """Lower clip of the others. Default: verl's."""

    clip_high: float = attrs.field(default=0.2, validator=clip_high_validator)
    """Upper clip of the others. Default: verl's."""

    aggregation: Aggregation = attrs.field(factory=TokenMean)
    """How token losses become one number. Default: as verl."""

    kl: KlPenalty | None = None
    """KL term against a reference policy. Default: none, as in the paper."""

    rollout_correction: RolloutCorrection | None = None
    """What is done about the sampler's mismatch. None: nothing, as in the paper."""

    @covariance_high.validator
    def _band_is_not_empty(self, _: object, value: float) -> None:
        if not self.covariance_low < value:
            raise ValueError(
                f"ClipCovLoss: expected covariance_low < covariance_high, got "
                f"{self.covariance_low} and {value}: no token would be taken out"
            )


@final
@attrs.frozen(kw_only=True)
class KlCovLoss:
    """The unclipped surrogate, with a pull to the proximal policy on tokens of large covariance."""

    kind: ClassVar[Literal["kl_cov"]] = "kl_cov"

    fraction: float = attrs.field(
        default=2e-4, validator=[attrs.validators.gt(0.0), attrs.validators.lt(1.0)]
    )
    """Tokens pulled, as a fraction of the batch's; at least one. Default: verl's, 2e-4."""

    coefficient: float = attrs.field(default=1.0, validator=positive_validator)
    """Factor of ``|policy - proximal|``, in reward units per nat. Default: verl's fallback, 1."""

    aggregation: Aggregation = attrs.field(factory=TokenMean)
    """How token losses become one number. Default: as verl."""

    kl: KlPenalty | None = None
    """KL term against a reference policy. Default: none, as in the paper."""

    rollout_correction: RolloutCorrection | None = None
    """What is done about the sampler's mismatch. None: nothing, as in the paper."""


def token_covariances(
    policy_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, " sequences"] | TokenAdvantages,
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
) -> Float[Tensor, "*layout"]:
    """``(log pi - mean) * (A - mean)`` of each token, means over the mask; 0 outside of it.

    In nats * reward units, without gradient (arXiv:2505.22617, section 4).
    """
    policy = masked_logprobs(policy_logprobs.detach(), loss_mask)
    token_advantages = per_token(advantages, sequences).to(policy.dtype)
    token_advantages = torch.where(loss_mask, token_advantages, 0.0)
    count = loss_mask.sum().clamp(min=1)
    product = (policy - policy.sum() / count) * (token_advantages - token_advantages.sum() / count)
    return torch.where(loss_mask, product, 0.0)


def clip_cov_selection(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, " sequences"] | TokenAdvantages,
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    config: ClipCovLoss,
    generator: torch.Generator,
) -> Bool[Tensor, "*layout"]:
    """Draw the tokens that Clip-Cov takes out, from those in the band that the clip leaves alone.

    Of *everything* that one optimizer step looks at; reads counts back from the device. At most
    ``max(1, fraction * tokens)`` are drawn, from `generator`, whose device is the tensors'.
    """
    covariances = token_covariances(policy_logprobs, advantages, loss_mask, sequences)
    surrogate = clipped_surrogate(
        masked_log_ratio(at_least_float32(policy_logprobs.detach()), proximal_logprobs, loss_mask),
        per_token(advantages, sequences),
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    in_band = (covariances > config.covariance_low) & (covariances < config.covariance_high)
    candidates = torch.nonzero((loss_mask & in_band & ~surrogate.clipped).reshape(-1)).squeeze(1)
    drawn = torch.randperm(len(candidates), generator=generator, device=candidates.device)
    chosen = candidates[drawn[: _num_selected(config.fraction, loss_mask)]]
    return _mask_of(chosen, loss_mask)


def kl_cov_selection(
    policy_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, " sequences"] | TokenAdvantages,
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    config: KlCovLoss,
) -> Bool[Tensor, "*layout"]:
    """The ``max(1, fraction * tokens)`` tokens of the largest covariance.

    Of *everything* that one optimizer step looks at; reads counts back from the device.
    """
    covariances = token_covariances(policy_logprobs, advantages, loss_mask, sequences)
    places = torch.nonzero(loss_mask.reshape(-1)).squeeze(1)
    count = min(_num_selected(config.fraction, loss_mask), len(places))
    chosen = places[covariances.reshape(-1)[places].topk(count).indices]
    return _mask_of(chosen, loss_mask)


def clip_cov_token_losses(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    selected_tokens: Bool[Tensor, "*layout"],
    *,
    config: ClipCovLoss,
) -> Surrogate:
    """Per-token clipped surrogate, and 0 without gradient on the selected tokens.

    Arguments as in `grpo_token_losses`; `selected_tokens` is `clip_cov_selection`'s.
    """
    surrogate = clipped_surrogate(
        masked_log_ratio(at_least_float32(policy_logprobs), proximal_logprobs, loss_mask),
        advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    return Surrogate(
        losses=torch.where(selected_tokens, 0.0, surrogate.losses),
        ratios=surrogate.ratios,
        clipped=surrogate.clipped | selected_tokens,
        dual_clipped=None,
    )


def kl_cov_token_losses(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    selected_tokens: Bool[Tensor, "*layout"],
    *,
    config: KlCovLoss,
) -> Surrogate:
    """``-r * A`` per token, and ``coefficient * |policy - proximal|`` more on the selected ones.

    Arguments as in `grpo_token_losses`; `selected_tokens` is `kl_cov_selection`'s. As in verl,
    the pull is the absolute log ratio, whose gradient at ratio 1 is 0.
    """
    log_ratio = masked_log_ratio(at_least_float32(policy_logprobs), proximal_logprobs, loss_mask)
    ratios = ratio_of(log_ratio)
    pull = torch.where(selected_tokens, config.coefficient * log_ratio.abs(), 0.0)
    return Surrogate(
        losses=pull - ratios * advantages.detach(),
        ratios=ratios.detach(),
        clipped=torch.zeros_like(loss_mask),
        dual_clipped=None,
    )


def _num_selected(fraction: float, loss_mask: Tensor) -> int:
    return max(1, int(fraction * int(loss_mask.sum())))


def _mask_of(chosen: Tensor, loss_mask: Tensor) -> Tensor:
    selected = torch.zeros_like(loss_mask).reshape(-1)
    selected[chosen] = True
    return selected.reshape(loss_mask.shape)
