"""Geometric means of clipped ratios."""

import math

import pytest
import torch

from algos_gspo_dapo_grpo import (
    GmpoLoss,
    GspoLoss,
    Sequences,
    gmpo_sequence_losses,
    gspo_sequence_losses,
)

SEQUENCES = Sequences.packed(torch.tensor([0, 2, 5]), num_tokens=5)
MASK = torch.tensor([True, True, True, True, False])
ADVANTAGES = torch.tensor([1.0, -1.0])


def test_tokens_are_clipped_before_the_mean() -> None:
    """A > 0: log ratios 1.0 (held at 0.4) and 0.2: exp(0.3). A < 0: -1.0 (held at -0.4), 0.2."""
    policy = torch.tensor([1.0, 0.2, -1.0, 0.2, 9.0], requires_grad=True)
    surrogate = gmpo_sequence_losses(
        policy, torch.zeros(5), ADVANTAGES, MASK, SEQUENCES, config=GmpoLoss()
    )
    high, low = math.exp(0.3), math.exp(-0.1)
    assert surrogate.losses.tolist() == pytest.approx([-high, low])
    assert surrogate.clipped.tolist() == [True, False, True, False, False]
    (gradient,) = torch.autograd.grad(surrogate.losses.sum(), policy)
    assert gradient.tolist() == pytest.approx([0.0, -high / 2, 0.0, low / 2, 0.0])


def test_the_clip_is_pessimistic_only() -> None:
    """A > 0 keeps log ratios far below, A < 0 far above."""
    policy = torch.tensor([-2.0, 0.0, 2.0, 0.0, 0.0])
    surrogate = gmpo_sequence_losses(
        policy, torch.zeros(5), ADVANTAGES, MASK, SEQUENCES, config=GmpoLoss()
    )
    assert not surrogate.clipped.any()
    assert surrogate.ratios.tolist() == pytest.approx([math.exp(-1.0), math.exp(1.0)])


def test_without_a_clip_that_acts_it_is_gspo() -> None:
    """Both are then the geometric mean, times the advantage."""
    policy = 0.05 * torch.randn(5)
    gmpo = gmpo_sequence_losses(
        policy, torch.zeros(5), ADVANTAGES, MASK, SEQUENCES, config=GmpoLoss()
    )
    gspo = gspo_sequence_losses(
        policy,
        torch.zeros(5),
        ADVANTAGES,
        MASK,
        SEQUENCES,
        config=GspoLoss(clip_low=0.9, clip_high=0.9),
    )
    torch.testing.assert_close(gmpo.losses, gspo.losses)


def test_an_advantage_of_zero_has_no_loss() -> None:
    """Nor a clip."""
    surrogate = gmpo_sequence_losses(
        torch.ones(5), torch.zeros(5), torch.zeros(2), MASK, SEQUENCES, config=GmpoLoss()
    )
    assert surrogate.losses.abs().tolist() == [0.0] * 2
    assert not surrogate.clipped.any()
