"""Slices of packed sequences, by hand; the collectives run in the engines' tests over gloo."""

import torch

from parallel_state.ulysses import TokenSlice, token_slice

IDS = torch.tensor([10, 11, 12, 20, 21])
"""Two sequences of three and two tokens; 11, 12 and 21 are to be predicted."""


def part(rank: int, num_ranks: int) -> TokenSlice:
    return token_slice(
        token_ids=IDS,
        positions=torch.tensor([0, 1, 2, 0, 1]),
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        loss_mask=torch.tensor([False, True, True, False, True]),
        num_ranks=num_ranks,
        rank=rank,
    )


def test_one_rank_has_everything() -> None:
    """The hidden states before the predicted tokens are those of places 0, 1 and 3."""
    whole = part(0, 1)
    assert whole.token_ids.tolist() == IDS.tolist()
    assert whole.rows.tolist() == [0, 1, 3]
    assert whole.targets.tolist() == [11, 12, 21]
    assert whole.scored.tolist() == [1, 2, 4]
    assert whole.row_counts == (3,)
    assert whole.cu_seqlens.tolist() == [0, 3, 5]


def test_slices_are_equal_and_filled_up() -> None:
    """Five tokens over two ranks: slices of three, the sixth a sequence that nothing reads.

    Rank 0 holds places 0 to 2, whose hidden states predict 11 and 12; 20 is nobody's target. Rank
    1 holds 20, 21 and the filling; the hidden state of 20 predicts 21, at place 0 of its slice.
    """
    first, second = part(0, 2), part(1, 2)
    assert first.token_ids.tolist() == [10, 11, 12]
    assert second.token_ids.tolist() == [20, 21, 0]
    assert second.positions.tolist() == [0, 1, 0]
    assert (first.rows.tolist(), second.rows.tolist()) == ([0, 1], [0])
    assert (first.targets.tolist(), second.targets.tolist()) == ([11, 12], [21])
    for each in (first, second):
        assert each.cu_seqlens.tolist() == [0, 3, 5, 6]
        assert each.scored.tolist() == [1, 2, 4]
        assert each.row_counts == (2, 1)


def test_a_target_may_lie_on_the_next_rank() -> None:
    """The rank that holds the token before predicts: over three ranks, 12 is rank 0's target."""
    parts = [part(rank, 3) for rank in range(3)]
    assert [each.token_ids.tolist() for each in parts] == [[10, 11], [12, 20], [21, 0]]
    assert [each.targets.tolist() for each in parts] == [[11, 12], [21], []]
    assert parts[0].row_counts == (2, 1, 0)


def test_a_mask_without_tokens_has_no_rows() -> None:
    """Its ranks still take part in every collective."""
    nothing = token_slice(
        token_ids=IDS,
        positions=torch.arange(5),
        cu_seqlens=torch.tensor([0, 5], dtype=torch.int32),
        loss_mask=torch.zeros(5, dtype=torch.bool),
        num_ranks=2,
        rank=1,
    )
    assert nothing.row_counts == (0, 0)
    assert nothing.rows.shape == nothing.scored.shape == (0,)
