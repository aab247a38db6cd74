"""Mean 0 and variance 1 over the batch."""

import pytest
import torch

from algos_gspo_dapo_grpo import whitened


def test_by_hand() -> None:
    """1, 2, 3 have mean 2 and variance 1; what weighs nothing is 0 and has no influence."""
    values = torch.tensor([1.0, torch.nan, 2.0, 3.0])
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert whitened(values, weights).tolist() == pytest.approx([-1.0, 0.0, 0.0, 1.0])


def test_a_weight_counts_as_often() -> None:
    """A value of weight 3 is three values."""
    repeated = whitened(torch.tensor([5.0, 5.0, 5.0, 1.0]), torch.ones(4))
    weighted = whitened(torch.tensor([5.0, 1.0]), torch.tensor([3.0, 1.0]))
    torch.testing.assert_close(weighted, repeated[2:])


def test_equal_values_and_single_ones_give_zero() -> None:
    """A01: 0.95 everywhere leaves no residue to be divided by a variance of nearly 0."""
    for size in range(20):
        assert whitened(torch.full((size,), 0.95), torch.ones(size)).tolist() == [0.0] * size
    assert whitened(torch.randn(3), torch.zeros(3)).tolist() == [0.0] * 3
