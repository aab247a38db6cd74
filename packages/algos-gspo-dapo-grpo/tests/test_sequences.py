"""Sums over sequences and their adjoint, in both layouts."""

import pytest
import torch

from algos_gspo_dapo_grpo import Sequences


def test_packed_sequences_are_summed_within_their_boundaries() -> None:
    """Lengths 2, 0 and 3: sums 3, 0 and 12; nothing leaks across a boundary."""
    sequences = Sequences.packed(torch.tensor([0, 2, 2, 5], dtype=torch.int32), num_tokens=5)
    assert sequences.sequence_ids.tolist() == [0, 0, 2, 2, 2]
    assert sequences.num_sequences == 3
    assert sequences.sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).tolist() == [3.0, 0.0, 12.0]


def test_padded_rows_are_sequences() -> None:
    """Each row of a padded tensor is one sequence."""
    sequences = Sequences.padded(batch=2, time=3)
    assert sequences.shape == (2, 3)
    assert sequences.sum(torch.arange(6.0).reshape(2, 3)).tolist() == [3.0, 12.0]
    assert sequences.spread(torch.tensor([7.0, 8.0])).tolist() == [[7.0] * 3, [8.0] * 3]


def test_no_sequence_at_all_is_a_layout_too() -> None:
    """An empty micro-batch has zero sequences and zero tokens."""
    sequences = Sequences.packed(torch.zeros(1, dtype=torch.int32), num_tokens=0)
    assert sequences.num_sequences == 0
    assert sequences.sum(torch.zeros(0)).shape == (0,)
    assert sequences.spread(torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_of_sum_and_spread_equal_finite_differences(*, padded: bool) -> None:
    """The hand-written backward passes are those of the functions."""
    sequences = (
        Sequences.padded(batch=2, time=3)
        if padded
        else Sequences.packed(torch.tensor([0, 2, 2, 6]), num_tokens=6)
    )
    per_token = torch.randn(sequences.shape, dtype=torch.float64, requires_grad=True)
    per_sequence = torch.randn(sequences.num_sequences, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sequences.sum, per_token)
    assert torch.autograd.gradcheck(sequences.spread, per_sequence)


def test_boundaries_of_the_wrong_shape_are_refused() -> None:
    """Boundaries need at least the closing entry."""
    with pytest.raises(ValueError, match=r"cu_seqlens of shape \(sequences \+ 1,\), got \(0,\)"):
        Sequences.packed(torch.zeros(0, dtype=torch.int64), num_tokens=0)
