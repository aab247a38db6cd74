"""Rewards relative to the success rate."""

import pytest
import torch

from algos_gspo_dapo_grpo import MaxRlAdvantages, maxrl_advantages

CONFIG = MaxRlAdvantages()


def test_rare_successes_weigh_more() -> None:
    """One success of four: (1 - 1/4) / (1/4) = 3 and -1; three of four: 1/3 and -1."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    ids = torch.tensor([0] * 4 + [1] * 4)
    advantages = maxrl_advantages(rewards, ids, config=CONFIG)
    expected = [3.0, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-4)


def test_it_is_the_gradient_of_the_log_success_rate() -> None:
    """Two outcomes, all of a large batch: the mean of A * score is d log p / d theta = 1 - p.

    The success has probability p = sigmoid(theta), so its score is 1 - p and the failure's -p.
    """
    successes, samples = 30, 100
    rewards = torch.tensor([1.0] * successes + [0.0] * (samples - successes))
    ids = torch.zeros(samples, dtype=torch.int64)
    p = successes / samples
    scores = torch.where(rewards > 0, 1 - p, -p)
    estimate = (maxrl_advantages(rewards, ids, config=CONFIG) * scores).mean()
    assert estimate.item() == pytest.approx(1 - p, abs=1e-4)


def test_a_group_without_success_gives_zero() -> None:
    """Nothing succeeded, so there is nothing to make likelier; nor is a negative mean a rate."""
    ids = torch.tensor([0, 0, 1, 1])
    advantages = maxrl_advantages(torch.tensor([0.0, 0.0, -3.0, 1.0]), ids, config=CONFIG)
    assert advantages.tolist() == [0.0] * 4


def test_epsilon_must_be_positive() -> None:
    """It is what a division by 0 is kept away with."""
    with pytest.raises(ValueError, match=r"MaxRlAdvantages: expected epsilon above 0"):
        MaxRlAdvantages(epsilon=0.0)
