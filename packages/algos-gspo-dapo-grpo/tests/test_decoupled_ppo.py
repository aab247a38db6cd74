"""Three policies."""

import math

import pytest
import torch
from torch import Tensor

from algos_gspo_dapo_grpo import (
    BatchCounts,
    Bypass,
    DecoupledPpoLoss,
    GrpoLoss,
    PolicyLoss,
    Sequences,
    TokenMean,
    TokenTruncation,
    policy_loss,
)

MASK = torch.tensor([True, True, True, False])
SEQUENCES = Sequences.packed(torch.tensor([0, 4]), num_tokens=4)


def _loss(config: PolicyLoss, rollout: Tensor | None) -> float:
    return policy_loss(
        torch.log(torch.tensor([1.5, 1.1, 1.0, 1.0])),
        proximal_logprobs=torch.zeros(4),
        advantages=torch.tensor([1.0]),
        loss_mask=MASK,
        sequences=SEQUENCES,
        config=config,
        counts=BatchCounts(num_tokens=3, num_sequences=1),
        rollout_logprobs=rollout,
    ).loss.item()


def test_the_clip_looks_at_the_proximal_and_the_weight_at_the_rollout_policy() -> None:
    """Clipped losses -1.2, -1.1, -1 times weights 1/2, 2 and 0 (8 is above 5)."""
    rollout = torch.log(torch.tensor([2.0, 0.5, 1 / 8, 1.0]))
    assert _loss(DecoupledPpoLoss(), rollout) == pytest.approx((-0.6 - 2.2) / 3)


def test_it_is_the_clipped_surrogate_with_a_correction() -> None:
    """The same formula by its other name."""
    rollout = 0.3 * torch.randn(4)
    weights = TokenTruncation(cap=1.2)
    decoupled = DecoupledPpoLoss(rollout_correction=weights)
    grpo = GrpoLoss(rollout_correction=weights, aggregation=TokenMean())
    assert _loss(decoupled, rollout) == _loss(grpo, rollout)


def test_equal_proximal_and_rollout_policies_are_ppo() -> None:
    """Every weight is then 1; so is that of a gap (A25)."""
    plain = _loss(GrpoLoss(aggregation=TokenMean()), None)
    assert _loss(DecoupledPpoLoss(), torch.zeros(4)) == pytest.approx(plain)
    assert _loss(DecoupledPpoLoss(), torch.full((4,), math.nan)) == pytest.approx(plain)


def test_the_third_policy_is_not_optional() -> None:
    """Without the sampler's log-probabilities it would silently be PPO."""
    with pytest.raises(ValueError, match=r"rollout_correction is set and needs rollout_logprobs"):
        _loss(DecoupledPpoLoss(), None)
    with pytest.raises(ValueError, match=r"expected rollout_correction to weigh.*got Bypass"):
        DecoupledPpoLoss(rollout_correction=Bypass())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected rollout_correction to weigh.*got NoneType"):
        DecoupledPpoLoss(rollout_correction=None)  # type: ignore[arg-type]
