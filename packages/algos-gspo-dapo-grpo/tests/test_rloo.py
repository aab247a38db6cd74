"""Leave-one-out baselines."""

import pytest
import torch

from algos_gspo_dapo_grpo import dr_grpo_advantages, rloo_advantages

GROUP = torch.zeros(4, dtype=torch.int64)


def test_each_sample_is_compared_with_the_others() -> None:
    """Rewards 1, 0, 0, 1: 1 - 1/3 and 0 - 2/3."""
    advantages = rloo_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), GROUP)
    assert advantages.tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_it_is_dr_grpo_times_n_over_n_minus_one() -> None:
    """The identity that the leave-one-out mean is built on, for groups of 2 and 4."""
    rewards, ids = torch.randn(6), torch.tensor([1, 0, 0, 1, 0, 0])
    factor = torch.tensor([2.0, 4 / 3, 4 / 3, 2.0, 4 / 3, 4 / 3])
    torch.testing.assert_close(
        rloo_advantages(rewards, ids), factor * dr_grpo_advantages(rewards, ids)
    )


def test_float_residue_is_not_divided() -> None:
    """A03: among 0 and seven 0.95 the first gets -0.95, the others 0.95 / 7."""
    rewards = torch.tensor([0.0] + [0.95] * 7)
    advantages = rloo_advantages(rewards, torch.zeros(8, dtype=torch.int64))
    assert advantages.tolist() == pytest.approx([-0.95] + [0.95 / 7] * 7, abs=1e-6)


def test_an_unscorable_sibling_is_in_no_baseline() -> None:
    """A01: 1, unscorable, 3 compare 1 with 3 alone."""
    rewards = torch.tensor([1.0, torch.nan, 3.0])
    assert rloo_advantages(rewards, GROUP[:3]).tolist() == [-2.0, 0.0, 2.0]
