"""GPG's advantages and its loss."""

import pytest
import torch

from algos_gspo_dapo_grpo import (
    Bypass,
    GpgAdvantages,
    GpgLoss,
    dr_grpo_advantages,
    gpg_advantages,
    gpg_token_losses,
)

IDS = torch.tensor([0, 0, 1, 1])


def test_groups_without_a_gradient_are_made_up_for() -> None:
    """Two of four samples are in a group of equal rewards, so the others count twice."""
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    advantages = gpg_advantages(rewards, IDS, config=GpgAdvantages())
    assert advantages.tolist() == [1.0, -1.0, 0.0, 0.0]


def test_with_spread_everywhere_it_is_dr_grpo() -> None:
    """Nothing to make up for, and a normaliser of 2 halves."""
    rewards = torch.tensor([1.0, 0.0, 5.0, 1.0])
    expected = dr_grpo_advantages(rewards, IDS)
    assert gpg_advantages(rewards, IDS, config=GpgAdvantages()).equal(expected)
    halved = gpg_advantages(rewards, IDS, config=GpgAdvantages(normaliser=2.0))
    assert halved.equal(expected / 2)


def test_no_spread_at_all_gives_zero() -> None:
    """A01: 4 / 0 is not computed."""
    assert gpg_advantages(torch.ones(4), IDS, config=GpgAdvantages()).tolist() == [0.0] * 4


def test_unscorable_samples_are_not_counted() -> None:
    """A01: three scored samples, two of them with a gradient: the factor is 3/2."""
    rewards = torch.tensor([1.0, 0.0, 1.0, torch.nan])
    advantages = gpg_advantages(rewards, IDS, config=GpgAdvantages())
    assert advantages.tolist() == pytest.approx([0.75, -0.75, 0.0, 0.0])


def test_the_loss_is_reinforce() -> None:
    """Gradient -A on the mask and 0 outside, whatever the proximal policy."""
    policy = torch.tensor([-1.0, -2.0, torch.nan], requires_grad=True)
    mask = torch.tensor([True, True, False])
    advantages = torch.tensor([1.0, -3.0, 9.0])
    surrogate = gpg_token_losses(policy, torch.zeros(3), advantages, mask, config=GpgLoss())
    assert surrogate.losses.tolist() == [1.0, -6.0, 0.0]
    (gradient,) = torch.autograd.grad(surrogate.losses.sum(), policy)
    assert gradient.tolist() == [-1.0, 3.0, 0.0]
    assert surrogate.ratios[2] == 1.0


def test_a_bypass_without_a_ratio_is_refused() -> None:
    """It would change nothing."""
    with pytest.raises(ValueError, match=r"Bypass has no effect: .*GPG has no ratio"):
        GpgLoss(rollout_correction=Bypass())  # type: ignore[arg-type]
