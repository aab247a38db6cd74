"""Length-weighted baselines."""

import pytest
import torch

from algos_gspo_dapo_grpo import dr_grpo_advantages, opo_advantages

GROUP = torch.zeros(3, dtype=torch.int64)


def test_long_samples_weigh_more_in_the_baseline() -> None:
    """Rewards 1, 0, 1 of 1, 2, 1 tokens: the baseline is 2 / 4."""
    rewards, lengths = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1, 2, 1])
    assert opo_advantages(rewards, GROUP, lengths).tolist() == [0.5, -0.5, 0.5]


def test_equal_lengths_give_the_plain_mean() -> None:
    """Then it is Dr.GRPO's baseline."""
    rewards = torch.randn(3)
    torch.testing.assert_close(
        opo_advantages(rewards, GROUP, torch.tensor([7, 7, 7])), dr_grpo_advantages(rewards, GROUP)
    )


def test_edges_give_zero() -> None:
    """A01, A04: equal rewards, a single scored sample and an unscorable one give exactly 0."""
    lengths = torch.tensor([1, 5, 3])
    assert opo_advantages(torch.full((3,), 0.95), GROUP, lengths).tolist() == [0.0] * 3
    alone = torch.tensor([2.0, torch.nan, 9.0])
    accepted = torch.tensor([True, True, False])
    assert opo_advantages(alone, GROUP, lengths, accepted=accepted).tolist() == [0.0] * 3
    no_tokens = torch.tensor([0, 0, 0])
    assert opo_advantages(torch.randn(3), GROUP, no_tokens).tolist() == [0.0] * 3


def test_a_rejected_sample_has_no_weight() -> None:
    """A04: a reward of 100 that was rejected is in no baseline, however long it is."""
    advantages = opo_advantages(
        torch.tensor([100.0, 2.0, 1.0]),
        GROUP,
        torch.tensor([1000, 3, 1]),
        accepted=torch.tensor([False, True, True]),
    )
    assert advantages.tolist() == pytest.approx([0.0, 0.25, -0.75])
