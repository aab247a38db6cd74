"""Sums over sequences and their adjoint, in both layouts."""

import inspect
from collections.abc import Callable

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


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_of_gradients_are_right_too(*, padded: bool) -> None:
    """A squared sum has a second derivative, which a hand-written backward pass could lose."""
    sequences = (
        Sequences.padded(batch=2, time=3)
        if padded
        else Sequences.packed(torch.tensor([0, 2, 2, 6]), num_tokens=6)
    )
    per_token = torch.randn(sequences.shape, dtype=torch.float64, requires_grad=True)
    per_sequence = torch.randn(sequences.num_sequences, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda v: sequences.sum(v).square(), per_token)
    assert torch.autograd.gradgradcheck(lambda v: sequences.spread(v).square(), per_sequence)


LENGTHS = (
    [1000],
    [256, 256],
    [255, 1, 256, 257, 3],
    [0, 700, 0, 0, 1, 511, 513, 0],
    [3] * 200,
    [70_000, 1, 65_535, 0, 140_000],
)


@pytest.mark.parametrize("lengths", LENGTHS, ids=sum)
def test_sums_of_any_lengths_are_those_of_their_parts(lengths: list[int]) -> None:
    """Sequences are cut at every 256th place, and pieces again: none is lost or counted twice."""
    values = torch.randn(sum(lengths), dtype=torch.float64)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    sums = Sequences.packed(cu_seqlens, num_tokens=sum(lengths)).sum(values)
    torch.testing.assert_close(sums, torch.stack([v.sum() for v in values.split(lengths)]))


def test_nan_stays_in_its_sequence() -> None:
    """A broken token shows in its own sum and in no other."""
    sequences = Sequences.packed(torch.tensor([0, 300, 600]), num_tokens=600)
    values = torch.ones(600)
    values[299] = torch.nan
    sums = sequences.sum(values)
    assert sums[0].isnan()
    assert sums[1] == 300.0


def test_rows_that_are_not_contiguous_are_read_as_they_look() -> None:
    """A transposed matrix is summed by its rows, not by the order in memory."""
    sequences = Sequences.padded(batch=2, time=3)
    transposed = torch.arange(6.0).reshape(3, 2).t()
    assert sequences.sum(transposed).tolist() == [6.0, 9.0]


@pytest.mark.parametrize(
    ("cu_seqlens", "num_tokens", "message"),
    [
        ([], 0, r"cu_seqlens of shape \(sequences \+ 1,\), got \(0,\)"),
        ([0, 2, 4], 5, r"to end with num_tokens 5, got 0 and 4"),
        ([0, 2, 8], 5, r"to end with num_tokens 5, got 0 and 8"),
        ([1, 5], 5, r"to begin with 0 .* got 1 and 5"),
        ([0, 4, 2, 5], 5, r"got 4 and then 2 for sequence 1"),
        ([0, 5], -1, r"num_tokens from 0 to 2147483647, got -1"),
        ([0], 2**31, r"num_tokens from 0 to 2147483647, got 2147483648"),
    ],
)
def test_boundaries_that_lose_tokens_are_refused(
    cu_seqlens: list[int], num_tokens: int, message: str
) -> None:
    """Tokens without a sequence, or with two, would be a wrong number."""
    with pytest.raises(ValueError, match=message):
        Sequences.packed(torch.tensor(cu_seqlens, dtype=torch.int64), num_tokens=num_tokens)


def test_boundaries_that_are_no_integers_are_refused() -> None:
    """A cast would cut 4.7 down to 4."""
    unchecked: Callable[..., Sequences] = inspect.unwrap(vars(Sequences)["packed"].__func__)
    with pytest.raises(ValueError, match=r"cu_seqlens of an integer dtype, got torch.float32"):
        unchecked(Sequences, torch.tensor([0.0, 5.0]), num_tokens=5)
