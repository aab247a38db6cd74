"""Tapered weights."""

import pytest
import torch

from algos_gspo_dapo_grpo import GpgLoss, Sequences, ToprLoss, gpg_token_losses, topr_token_losses

SEQUENCES = Sequences.packed(torch.tensor([0, 2, 4, 6]), num_tokens=6)
MASK = torch.ones(6, dtype=torch.bool)


def test_bad_samples_fade_with_their_probability() -> None:
    """Ratios 1/4 (A = 1), 1/4 (A = -1) and 4 (A = -1): weights 1, 1/4 and 1."""
    half = torch.log(torch.tensor(0.5))
    policy = torch.stack([half, half, half, half, -half, -half]).requires_grad_()
    surrogate = topr_token_losses(
        policy, torch.zeros(6), torch.tensor([1.0, -1.0, -1.0]), MASK, SEQUENCES, config=ToprLoss()
    )
    (gradient,) = torch.autograd.grad(surrogate.losses.sum(), policy)
    assert gradient.tolist() == pytest.approx([-1.0, -1.0, 0.25, 0.25, 1.0, 1.0])
    assert surrogate.clipped.tolist() == [False] * 4 + [True] * 2
    assert surrogate.ratios.tolist() == pytest.approx([0.25] * 4 + [4.0] * 2)


def test_on_policy_it_is_gpg() -> None:
    """With ratio 1 both are REINFORCE."""
    policy, advantages = torch.randn(6), torch.randn(3)
    topr = topr_token_losses(policy, policy, advantages, MASK, SEQUENCES, config=ToprLoss())
    spread = SEQUENCES.spread(advantages)
    gpg = gpg_token_losses(policy, policy, spread, MASK, config=GpgLoss())
    torch.testing.assert_close(topr.losses, gpg.losses)


def test_a_forgotten_bad_sample_has_no_gradient_and_a_good_one_all_of_it() -> None:
    """However long the sequence: the product of ratios is 0 or huge, and finite."""
    policy = torch.full((6,), -1e4, requires_grad=True)
    surrogate = topr_token_losses(
        policy, torch.zeros(6), torch.tensor([-1.0, 1.0, 0.0]), MASK, SEQUENCES, config=ToprLoss()
    )
    (gradient,) = torch.autograd.grad(surrogate.losses.sum(), policy)
    assert gradient.tolist() == pytest.approx([0.0, 0.0, -1.0, -1.0, 0.0, 0.0], abs=1e-8)
