"""Advantages whitened over the batch."""

import pytest
import torch

from algos_gspo_dapo_grpo import (
    ReinforcePlusPlusAdvantages,
    Sequences,
    dr_grpo_advantages,
    outcome_token_rewards,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    whitened,
)


def test_each_token_carries_its_whitened_return() -> None:
    """Outcomes 3 (two tokens) and 0 (one): returns 3, 3, 0 have mean 2 and variance 3."""
    sequences = Sequences.padded(batch=2, time=2)
    mask = torch.tensor([[True, True], [True, False]])
    advantages = reinforce_plus_plus_advantages(
        outcome_token_rewards(torch.tensor([3.0, 0.0]), mask, sequences),
        mask,
        sequences,
        config=ReinforcePlusPlusAdvantages(),
    )
    step = 1 / 3**0.5
    assert advantages.flatten().tolist() == pytest.approx([step, step, -2 * step, 0.0])


def test_the_baseline_form_whitens_group_centred_rewards() -> None:
    """It is Dr.GRPO, whitened with one count per token."""
    rewards, ids = torch.randn(6), torch.tensor([0, 0, 0, 1, 1, 1])
    lengths = torch.tensor([1, 2, 3, 4, 5, 6])
    expected = whitened(dr_grpo_advantages(rewards, ids), lengths.float())
    actual = reinforce_plus_plus_baseline_advantages(rewards, ids, lengths)
    torch.testing.assert_close(actual, expected)


def test_unscorable_and_rejected_samples_are_not_in_the_batch() -> None:
    """A01, A04: as if they had not been sampled; groups of equal rewards count as 0."""
    rewards = torch.tensor([1.0, 0.0, torch.nan, 2.0, 2.0, 50.0])
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    lengths = torch.tensor([1, 2, 3, 4, 5, 6])
    accepted = torch.tensor([True] * 5 + [False])
    actual = reinforce_plus_plus_baseline_advantages(rewards, ids, lengths, accepted=accepted)
    kept = torch.tensor([0, 1, 3, 4])
    expected = reinforce_plus_plus_baseline_advantages(rewards[kept], ids[kept], lengths[kept])
    assert actual[[2, 5]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(actual[kept], expected)


def test_a_batch_of_equal_outcomes_gives_zero() -> None:
    """A01: nothing is above average."""
    mask = torch.ones(5, dtype=torch.bool)
    sequences = Sequences.packed(torch.tensor([0, 2, 5]), num_tokens=5)
    paid = outcome_token_rewards(torch.tensor([0.95, 0.95]), mask, sequences)
    config = ReinforcePlusPlusAdvantages()
    advantages = reinforce_plus_plus_advantages(paid, mask, sequences, config=config)
    assert advantages.tolist() == [0.0] * 5
