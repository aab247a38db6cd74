"""Correcting for the sampler having drawn from a slightly different policy.

The mismatch ratio ``exp(proximal - rollout)`` holds two programs' numerics, plus staleness if
there is any. Weighting each token's loss with it, truncated from above, removes the bias that the
mismatch causes and bounds the variance.

Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(fengyao.notion.site/off-policy-rl): truncated importance sampling (TIS).
"""

import math
from typing import ClassVar, Literal, final

import attrs
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.precision import at_least_float32
from algos_gspo_dapo_grpo.surrogate import LOG_RATIO_CAP


@final
@attrs.frozen(kw_only=True)
class TokenTruncation:
    """Token-level truncated importance weights, ``min(exp(proximal - rollout), cap)``."""

    kind: ClassVar[Literal["token_truncation"]] = "token_truncation"

    cap: float = attrs.field(
        default=2.0,
        validator=[attrs.validators.ge(1.0), attrs.validators.le(math.exp(LOG_RATIO_CAP))],
    )
    """Largest weight. Default: 2, as verl and ms-swift have it.

    At least 1, since less would shrink tokens on which the two policies agree, and at most
    exp(20), where log ratios are held.
    """


def truncated_weights(
    proximal_logprobs: Float[Tensor, "*layout"],
    rollout_logprobs: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    *,
    config: TokenTruncation,
) -> Float[Tensor, "*layout"]:
    """Importance weight of each token, ``min(exp(proximal - rollout), cap)``, without gradient.

    A token whose rollout log-probability is not finite (the sampler returned none) has weight 1,
    and so has every place outside the mask. NaN in `proximal_logprobs` on the mask shows.
    """
    rollout = at_least_float32(rollout_logprobs.detach())
    known = loss_mask & torch.isfinite(rollout)
    log_weight = at_least_float32(proximal_logprobs.detach()) - rollout
    weights = torch.exp(torch.clamp(log_weight, max=LOG_RATIO_CAP)).clamp(max=config.cap)
    return torch.where(known, weights, 1.0)
