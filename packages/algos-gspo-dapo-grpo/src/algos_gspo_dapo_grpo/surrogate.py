"""The clipped surrogate that GRPO, DAPO and GSPO share; they differ in what a ratio belongs to.

Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347, eq. 7.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.precision import at_least_float32

LOG_RATIO_CAP = 20.0
"""Log ratios, in nats, are held in ``[-20, 20]`` before exp; beyond that the gradient is 0.

exp overflows float32 at 88.8, and an infinite value becomes NaN in the backward pass even where
the clip hides it in the forward pass. exp(20) = 4.9e8 is far beyond any clip range.
"""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """Losses with what the diagnostics want to know about them, per token or per sequence."""

    losses: Float[Tensor, "*units"]
    """To be minimised, in reward units; carries the gradient."""

    ratios: Float[Tensor, "*units"]
    """Importance ratio, detached."""

    clipped: Bool[Tensor, "*clipped_units"]
    """True where a clip, or a bound of the method's weight, decides the loss.

    Of the same units as the losses, but for GMPO: its loss is the sequence's, its clip the token's.
    """

    dual_clipped: Bool[Tensor, "*units"] | None
    """True where the dual clip decides the loss; None if there is none."""


def clipped_surrogate(
    log_ratios: Float[Tensor, "*units"],
    advantages: Float[Tensor, "*units"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """Pessimistic bound ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``.

    Args:
        log_ratios: log r, in nats; the only input that carries a gradient. Held within
            `LOG_RATIO_CAP`, so value and gradient are finite for every finite input.
        advantages: A, in reward units; data, whatever graph they come with.
        clip_low: the ratio is held at or above ``1 - clip_low`` where A < 0.
        clip_high: the ratio is held at or below ``1 + clip_high`` where A > 0.
        dual_clip: where A < 0 the loss is at most ``dual_clip * |A|``, however large r is
            (Ye et al. 2020, arXiv:1912.09729, section "dual-clip PPO"). None: no such bound.

    Returns:
        One loss per entry. Masking and averaging are the caller's.
    """
    ratios = ratio_of(log_ratios)
    advantages = advantages.detach()
    unclipped_losses = -ratios * advantages
    clipped_losses = -torch.clamp(ratios, 1.0 - clip_low, 1.0 + clip_high) * advantages
    clipped = clipped_losses > unclipped_losses
    losses = torch.where(clipped, clipped_losses, unclipped_losses)
    dual_clipped = None
    if dual_clip is not None:
        bound = dual_clip * advantages.abs()
        dual_clipped = losses > bound  # only where A < 0: elsewhere losses are not above 0
        losses = torch.where(dual_clipped, bound, losses)
    return Surrogate(
        losses=losses, ratios=ratios.detach(), clipped=clipped, dual_clipped=dual_clipped
    )


def masked_log_ratio(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
) -> Float[Tensor, "*layout"]:
    """``policy - proximal`` in nats on the mask, exactly 0 without gradient outside of it.

    `proximal_logprobs` never carries a gradient, even if the tensor given would.
    """
    log_ratio = policy_logprobs - proximal_logprobs.detach().to(policy_logprobs.dtype)
    return torch.where(loss_mask, log_ratio, 0.0)


def ratio_of(log_ratios: Float[Tensor, "*units"]) -> Float[Tensor, "*units"]:
    """``exp(log ratio)`` with the log ratio held within `LOG_RATIO_CAP`."""
    return torch.exp(torch.clamp(log_ratios, -LOG_RATIO_CAP, LOG_RATIO_CAP))


def masked_logprobs(
    logprobs: Float[Tensor, "*layout"], loss_mask: Bool[Tensor, "*layout"]
) -> Float[Tensor, "*layout"]:
    """float32 or better on the mask, exactly 0 without gradient outside of it."""
    return torch.where(loss_mask, at_least_float32(logprobs), 0.0)
