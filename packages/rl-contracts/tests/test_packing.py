"""What holds of packing by token budget."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from rl_contracts.packing import PADDING_ID, pack, unpack
from rl_contracts.rollout import PolicyVersion, Trajectory


def _trajectory(name: str, length: int, *, prompt: int = 1) -> Trajectory:
    return Trajectory(
        trajectory_id=name,
        group_id="group",
        token_ids=tuple(100 * int(name) + place for place in range(length)),
        loss_mask=tuple(place >= prompt for place in range(length)),
        rollout_logprobs=tuple(-0.5 if place >= prompt else 0.0 for place in range(length)),
        oldest_version=PolicyVersion(0),
        newest_version=PolicyVersion(0),
    )


def _rows(*lengths: int) -> list[Trajectory]:
    return [_trajectory(str(index), length) for index, length in enumerate(lengths)]


def test_one_micro_batch_holds_the_rows_end_to_end() -> None:
    """Two rows of 3 and 2 tokens give every tensor the values worked out by hand."""
    [[batch]] = pack(_rows(3, 2), [1.0, -1.0], max_tokens=5)
    assert batch.token_ids.tolist() == [0, 1, 2, 100, 101]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.loss_mask.tolist() == [False, True, True, False, True]
    assert batch.rollout_logprobs.tolist() == [0.0, -0.5, -0.5, 0.0, -0.5]
    assert batch.advantages.tolist() == [1.0, -1.0]
    assert batch.trajectory_ids == ("0", "1")


def test_values_come_back_in_input_order() -> None:
    """Rows of 9, 1, 7, 2 and 5 tokens, dealt to two ranks, come back as they went in (A51)."""
    rows = _rows(9, 1, 7, 2, 5)
    ranks = pack(rows, [0.0] * 5, max_tokens=10, num_ranks=2)
    batches = [batch for rank in ranks for batch in rank]
    values = unpack(
        [batch.token_ids for batch in batches],
        batches,
        trajectory_ids=[row.trajectory_id for row in rows],
    )
    assert [tuple(value.tolist()) for value in values] == [row.token_ids for row in rows]


def test_every_rank_gets_the_same_number() -> None:
    """One long row and one short over two ranks of one micro-batch each; never 2 and 0 (A50)."""
    ranks = pack(_rows(8, 2), [0.0, 0.0], max_tokens=10, num_ranks=2)
    assert [[batch.trajectory_ids for batch in rank] for rank in ranks] == [[("0",)], [("1",)]]


def test_a_rank_without_rows_gets_a_token_outside_the_mask() -> None:
    """One row over two ranks: the other gets one masked token that no loss looks at (A50)."""
    [[first], [second]] = pack(_rows(4), [2.0], max_tokens=4, num_ranks=2)
    assert first.trajectory_ids == ("0",)
    assert second.trajectory_ids == (PADDING_ID,)
    assert second.loss_mask.tolist() == [False]
    assert second.advantages.tolist() == [0.0]


def _routed(row: Trajectory, *, layers: int = 2) -> Trajectory:
    """Expert ``10 * token + layer`` for each token but the last."""
    tokens, numbers = np.arange(len(row.token_ids) - 1), np.arange(layers)
    return replace(row, routed_experts=(10 * tokens[:, None] + numbers)[:, :, None])


def test_experts_are_packed_beside_their_tokens() -> None:
    """Rows of 3 and 2 tokens in two layers; the sampler says nothing of a row's last token."""
    [[batch]] = pack([_routed(row) for row in _rows(3, 2)], [1.0, -1.0], max_tokens=5)
    routes = batch.to(torch.device("cpu")).routed_experts
    assert routes is not None
    assert routes.dtype == torch.int16
    assert routes[:, :, 0].tolist() == [[0, 1], [10, 11], [-1, -1], [0, 1], [-1, -1]]
    [_, [padding]] = pack([_routed(row) for row in _rows(4)], [1.0], max_tokens=4, num_ranks=2)
    assert padding.trajectory_ids == (PADDING_ID,)
    assert padding.routed_experts is not None
    assert padding.routed_experts.tolist() == [[[-1], [-1]]]
    [[plain]] = pack(_rows(3, 2), [1.0, -1.0], max_tokens=5)
    assert plain.routed_experts is None


def test_rows_with_and_without_experts_are_not_packed_together() -> None:
    """The others would train without replay, and nobody would know."""
    first, second = _rows(3, 2)
    with pytest.raises(ValueError, match=r"of all trajectories or of none, .* got those of 1 of 2"):
        pack([_routed(first), second], [1.0, 1.0], max_tokens=5)
    with pytest.raises(ValueError, match=r"of sizes \(2, 1\), \(3, 1\)$"):
        pack([_routed(first), _routed(second, layers=3)], [1.0, 1.0], max_tokens=5)


def test_experts_of_another_shape_or_type_are_refused() -> None:
    """One entry per token, of the type that says -1 for none."""
    [[batch]] = pack([_routed(row) for row in _rows(3, 2)], [1.0, -1.0], max_tokens=5)
    assert batch.routed_experts is not None
    with pytest.raises(ValueError, match=r"shape \(5, layers, .* got \(4, 2, 1\) and torch.int16"):
        replace(batch, routed_experts=batch.routed_experts[1:])
    with pytest.raises(ValueError, match=r"type torch.int16, got \(5, 2, 1\) and torch.uint8"):
        replace(batch, routed_experts=batch.routed_experts.to(torch.uint8))


def test_micro_batches_are_balanced() -> None:
    """Lengths 6, 5, 4, 3, 2 in two micro-batches of at most 12 tokens give 11 and 9."""
    [batches] = pack(_rows(6, 5, 4, 3, 2), [0.0] * 5, max_tokens=12)
    assert [batch.token_ids.shape[0] for batch in batches] == [11, 9]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    max_tokens=st.integers(9, 30),
    num_ranks=st.integers(1, 4),
)
def test_each_row_is_packed_once_within_the_budget(
    lengths: list[int], max_tokens: int, num_ranks: int
) -> None:
    """Whatever the lengths: every row once, no micro-batch above the budget, ranks alike."""
    rows = _rows(*lengths)
    ranks = pack(rows, [0.0] * len(rows), max_tokens=max_tokens, num_ranks=num_ranks)
    batches = [batch for rank in ranks for batch in rank]
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    assert max(batch.token_ids.shape[0] for batch in batches) <= max_tokens
    names = [name for batch in batches for name in batch.trajectory_ids if name != PADDING_ID]
    assert sorted(names) == sorted(row.trajectory_id for row in rows)


def test_what_is_refused_says_why() -> None:
    """A row above the budget, a missing advantage, a double id and nothing at all are errors."""
    with pytest.raises(ValueError, match=r"trajectory 1 has 7 tokens.*max_tokens = 6"):
        pack(_rows(2, 7), [0.0, 0.0], max_tokens=6)
    with pytest.raises(ValueError, match=r"got 1 for 2 trajectories"):
        pack(_rows(2, 2), [0.0], max_tokens=6)
    with pytest.raises(ValueError, match=r"id '0' is taken"):
        pack(_rows(2) * 2, [0.0, 0.0], max_tokens=6)
    with pytest.raises(ValueError, match=r"at least one trajectory, got none"):
        pack([], [], max_tokens=6)
    with pytest.raises(ValueError, match=r"num_ranks of at least 1, got 0"):
        pack(_rows(2), [0.0], max_tokens=6, num_ranks=0)


def test_unpacking_the_wrong_tensors_is_refused() -> None:
    """Too few tensors, one of another length, and an id that is elsewhere are errors."""
    [batches] = pack(_rows(3, 2), [0.0, 0.0], max_tokens=5)
    with pytest.raises(ValueError, match=r"got 0 for 1"):
        unpack([], batches, trajectory_ids=["0"])
    with pytest.raises(ValueError, match=r"expected 5 entries for batch 0.*\(4,\)"):
        unpack([torch.zeros(4)], batches, trajectory_ids=["0"])
    with pytest.raises(ValueError, match=r"1 of 2 trajectories are in none.*'7'"):
        unpack([torch.zeros(5)], batches, trajectory_ids=["0", "7"])
