"""DAPO: decoupled clip range and token-level mean, and the paper's settings as one value.

Source: Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
arXiv:2503.14476.
"""

from typing import ClassVar, Literal, final

import attrs
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.advantages import GrpoAdvantages
from algos_gspo_dapo_grpo.aggregation import TokenMean
from algos_gspo_dapo_grpo.dynamic_sampling import DynamicSampling
from algos_gspo_dapo_grpo.overlong import SoftOverlong
from algos_gspo_dapo_grpo.precision import at_least_float32
from algos_gspo_dapo_grpo.rollout_correction import RolloutCorrection
from algos_gspo_dapo_grpo.surrogate import Surrogate, clipped_surrogate, masked_log_ratio
from algos_gspo_dapo_grpo.validators import clip_high_validator, clip_low_validator


@final
@attrs.frozen(kw_only=True)
class DapoLoss:
    """The DAPO loss: token mean and no KL term, by definition (arXiv:2503.14476, eq. 8).

    With another mean, a KL term or a dual clip it is not DAPO any more: `GrpoLoss` takes them.
    """

    kind: ClassVar[Literal["dapo"]] = "dapo"

    aggregation: ClassVar[TokenMean] = TokenMean()
    """The token-level mean of section 3.3, which is part of the method and no setting."""

    clip_low: float = attrs.field(default=0.2, validator=clip_low_validator)
    """Lower clip: the ratio is held at or above ``1 - clip_low`` (paper, section 4.1)."""

    clip_high: float = attrs.field(default=0.28, validator=clip_high_validator)
    """Upper clip: the ratio is held at or below ``1 + clip_high`` (paper, section 4.1)."""

    rollout_correction: RolloutCorrection | None = None
    """What is done about the sampler's mismatch. None: nothing, as in the paper."""


_PAPER_SAMPLING = DynamicSampling(max_rounds=10, incomplete="yield")
_PAPER_OVERLONG = SoftOverlong(max_length=20_480, buffer=4_096)


@final
@attrs.frozen(kw_only=True)
class DapoConfig:
    """All four techniques of the paper; ``DapoConfig()`` holds the paper's settings."""

    loss: DapoLoss = attrs.field(factory=DapoLoss)
    """Clip-higher (section 3.1) and token-level loss (section 3.3)."""

    advantages: GrpoAdvantages = attrs.field(factory=GrpoAdvantages)
    """Group-normalised advantages (eq. 9)."""

    dynamic_sampling: DynamicSampling | None = _PAPER_SAMPLING
    """Sampling until the batch is full of groups with a signal (section 3.2). None: off.

    The paper sets no bound; 10 rounds is that of verl's DAPO launch scripts.
    """

    overlong: SoftOverlong | None = _PAPER_OVERLONG
    """Soft punishment of long completions (section 3.4, values of section 4.1). None: off.

    `max_length` is the longest completion that the sampler may draw.
    """


def dapo_token_losses(
    policy_logprobs: Float[Tensor, "*layout"],
    proximal_logprobs: Float[Tensor, "*layout"],
    advantages: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    *,
    config: DapoLoss,
) -> Surrogate:
    """Per-token clipped surrogate of DAPO (arXiv:2503.14476, eq. 8).

    Args:
        policy_logprobs: log pi_theta(o_t), in nats; the only input that carries a gradient.
        proximal_logprobs: log pi_old(o_t), in nats, computed by the trainer.
        advantages: one per token, in reward units; `Sequences.spread` makes them of one per
            sequence.
        loss_mask: True on the sampled tokens. The ratio is 1 outside of it.
        config: clip range.

    Returns:
        Losses to minimise, one per token, not yet masked.
    """
    return clipped_surrogate(
        masked_log_ratio(at_least_float32(policy_logprobs), proximal_logprobs, loss_mask),
        advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
