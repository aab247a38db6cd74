"""GPG: the plain policy gradient on group-centred rewards, without ratio, clip or reference.

Source: Chu et al. 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline for Model
Reasoning", arXiv:2504.02546, eq. 5 for the loss; section 2.2, eq. 7 for alpha.
"""

from typing import ClassVar, Literal, final

import attrs
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from algos_gspo_dapo_grpo.aggregation import Aggregation, TokenMean
from algos_gspo_dapo_grpo.groups import grouped
from algos_gspo_dapo_grpo.kl import KlPenalty
from algos_gspo_dapo_grpo.rollout_correction import Bypass, ImportanceWeighting
from algos_gspo_dapo_grpo.surrogate import (
    Surrogate,
    masked_log_ratio,
    masked_logprobs,
    ratio_of,
)
from algos_gspo_dapo_grpo.validators import positive_validator


@final
@attrs.frozen(kw_only=True)
class GpgAdvantages:
    """``alpha * (reward - group mean) / normaliser``."""

    kind: ClassVar[Literal["gpg"]] = "gpg"

    normaliser: float = attrs.field(default=1.0, validator=positive_validator)
    """Divides every advantage, the paper's F_norm. Default: 1, as the paper recommends."""


def gpg_advantages(
    rewards: Float[Tensor, " samples"],
    group_ids: Int[Tensor, " samples"],
    *,
    config: GpgAdvantages,
    accepted: Bool[Tensor, " samples"] | None = None,
) -> Float[Tensor, " samples"]:
    """Rewards centred within their group, scaled up for the samples without a gradient.

    ``alpha = N / (N - M)``: of N scored samples of the batch M are in groups of equal rewards
    and add nothing to the gradient, which the factor makes up for (arXiv:2504.02546, eq. 7,
    "accurate gradient estimation"). So `rewards` are those of *everything* that one optimizer step
    looks at, not of a micro-batch. Other arguments as in `grpo_advantages`.

    Returns:
        One advantage per sample, in reward units, float32 or better; always finite, and 0
        everywhere if no group has a spread.
    """
    groups = grouped(rewards, group_ids, accepted)
    centred = groups.weighted_centre()
    spread = groups.sum(centred.abs()) > 0
    num_scored = groups.scored.to(centred.dtype).sum()
    num_informative = (groups.scored & spread).to(centred.dtype).sum()
    alpha = num_scored / torch.clamp(num_informative, min=1.0)
    return alpha * centred / config.normaliser


@final
@attrs.frozen(kw_only=True)
class GpgLoss:
    """The GPG loss: the policy gradient itself. There is no ratio in it, and no clip."""

    kind: ClassVar[Literal["gpg"]] = "gpg"

    aggregation: Aggregation = attrs.field(factory=TokenMean)
    """How token losses become one number. Default: the paper's mean over all tokens."""

    kl: KlPenalty | None = None
    """KL term against a reference policy. Default: none, as in the paper."""

    rollout_correction: ImportanceWeighting | None = attrs.field(default=None)
    """Weights against the sampler's mismatch. None: none, as in the paper."""

    @rollout_correction.validator
    def _no_bypass(self, _: object, value: object) -> None:
        if isinstance(value, Bypass):
            raise ValueError(  # noqa: TRY004  # a setting out of a file, like the others
                "GpgLoss: rollout_correction Bypass has no effect: it chooses what a ratio is "
                "taken against, and GPG has no ratio; leave it None, weigh with TokenTruncation, "
                "or use CispoLoss, whose detached ratio it acts on"
            )


def gpg_token_losses(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    *,
    config: GpgLoss,
) -> Surrogate:
    """``-A * log pi`` per token (arXiv:2504.02546, eq. 5).

    Args:
        policy_logprobs: log pi_theta(y_t), in nats; the only input that carries a gradient.
        proximal_logprobs: log pi_old(y_t), in nats: only looked at, for the ratio's metric.
        advantages: one per token, in reward units.
        loss_mask: True on the sampled tokens.
        config: nothing that acts here; the aggregation is `policy_loss`'s business.

    Returns:
        Losses to minimise, one per token; nothing is ever clipped. The value is no objective:
        only its gradient has a meaning.
    """
    del config
    policy = masked_logprobs(policy_logprobs, loss_mask)
    return Surrogate(
        losses=-advantages.detach() * policy,
        ratios=ratio_of(masked_log_ratio(policy, proximal_logprobs, loss_mask)).detach(),
        clipped=torch.zeros_like(loss_mask),
        dual_clipped=None,
    )
