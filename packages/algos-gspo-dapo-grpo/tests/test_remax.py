"""The greedy completion as baseline."""

import math

import torch

from algos_gspo_dapo_grpo import remax_advantages


def test_the_baseline_is_the_greedy_reward() -> None:
    """1 against 0.25 and 0 against 0.25."""
    advantages = remax_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.25]))
    assert advantages.tolist() == [0.75, -0.25]


def test_without_either_reward_there_is_no_advantage() -> None:
    """A01: an unscorable sample, an unscorable baseline and a rejected sample give 0."""
    advantages = remax_advantages(
        torch.tensor([math.nan, 1.0, 1.0, 1.0]),
        torch.tensor([0.0, math.inf, 0.0, 0.0]),
        accepted=torch.tensor([True, True, False, True]),
    )
    assert advantages.tolist() == [0.0, 0.0, 0.0, 1.0]
