"""Several rewards."""

import pytest
import torch

from algos_gspo_dapo_grpo import (
    GdpoAdvantages,
    GrpoAdvantages,
    gdpo_advantages,
    grpo_advantages,
    whitened,
)

IDS = torch.tensor([0, 0, 0, 0])


def test_rewards_with_equal_sums_are_told_apart() -> None:
    """Sums 1, 1, 0, 1 are three equal ones to GRPO; here a rare reward counts more.

    The first column has one success of four, the second two: deviations 0.5 and 0.57735, so
    1.5 - 0.866, -0.5 + 0.866, -0.5 - 0.866, -0.5 + 0.866, with mean 0 and variance 0.8453.
    """
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    advantages = gdpo_advantages(rewards, IDS, config=GdpoAdvantages(weights=(1.0, 1.0)))
    assert advantages.tolist() == pytest.approx([0.6896, 0.3981, -1.4858, 0.3981], abs=1e-3)


def test_one_reward_is_whitened_grpo() -> None:
    """With a single column the decoupling has nothing to do."""
    rewards, ids = torch.randn(6, 1), torch.tensor([0, 0, 0, 1, 1, 1])
    config = GdpoAdvantages(weights=(2.0,), within_group=GrpoAdvantages(std="population"))
    expected = whitened(
        2.0 * grpo_advantages(rewards[:, 0], ids, config=config.within_group), torch.ones(6)
    )
    torch.testing.assert_close(gdpo_advantages(rewards, ids, config=config), expected)


def test_the_scale_of_a_reward_does_not_matter() -> None:
    """A reward a thousand times as large weighs as much as before."""
    rewards = torch.rand(4, 2, dtype=torch.float64)
    config = GdpoAdvantages(weights=(1.0, 0.5))
    scaled = rewards * torch.tensor([1000.0, 1.0])
    torch.testing.assert_close(
        gdpo_advantages(scaled, IDS, config=config),
        gdpo_advantages(rewards, IDS, config=config),
        atol=1e-4,
        rtol=1e-4,
    )


def test_partly_unscorable_samples_keep_their_other_rewards() -> None:
    """A01: a missing reward leaves the sample in; all missing gives 0 and no place in the mean."""
    rewards = torch.tensor([[1.0, torch.nan], [0.0, 1.0], [1.0, 0.0], [torch.nan, torch.nan]])
    config = GdpoAdvantages(weights=(1.0, 1.0))
    advantages = gdpo_advantages(rewards, IDS, config=config)
    assert torch.isfinite(advantages).all()
    assert advantages[0] > 0
    assert advantages[3] == 0.0
    torch.testing.assert_close(advantages[:3], gdpo_advantages(rewards[:3], IDS[:3], config=config))


def test_the_number_of_weights_must_fit() -> None:
    """A forgotten weight is an error, and so are weights that do nothing."""
    with pytest.raises(
        ValueError, match=r"expected 1 columns of rewards, one per weight, got shape \(4, 2\)"
    ):
        gdpo_advantages(torch.zeros(4, 2), IDS, config=GdpoAdvantages(weights=(1.0,)))
    with pytest.raises(ValueError, match=r"at least one reward weight that is not 0, got \(\)"):
        GdpoAdvantages(weights=())
    with pytest.raises(ValueError, match=r"expected finite reward weights, got \(1.0, nan\)"):
        GdpoAdvantages(weights=(1.0, torch.nan))
