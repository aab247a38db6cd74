"""Where ranks sit, against drawings by hand and against each other."""

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from parallel_state import (
    ExtraParallelSizes,
    ParallelState,
    UnknownAxisError,
    axis_groups,
    axis_names,
    rank_coordinates,
)

STATE = ParallelState.for_world(
    16,
    dp_replicate_size=2,
    ulysses_size=2,
    extra_parallel_sizes=ExtraParallelSizes.of(ep=4),
)


def test_coordinates_of_one_rank() -> None:
    """Rank 13 of 2 replicas x 4 shards x 2 Ulysses ranks: 13 = 8 + 2 * 2 + 1."""
    assert rank_coordinates(STATE, 13) == {
        "pipeline": 0,
        "dp_replicate": 1,
        "dp_shard": 2,
        "ulysses": 1,
        "tensor": 0,
        "fsdp": 5,
        "data": 13,
        "ep": 1,
        "ep_fsdp": 1,
    }


def test_groups_by_hand() -> None:
    """ep is the inner cut of each replica's eight ranks, ep_fsdp the outer one."""
    assert axis_groups(STATE, "ep") == (
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
        (12, 13, 14, 15),
    )
    assert axis_groups(STATE, "ep_fsdp") == (
        (0, 4),
        (1, 5),
        (2, 6),
        (3, 7),
        (8, 12),
        (9, 13),
        (10, 14),
        (11, 15),
    )
    assert axis_groups(STATE, "dp_shard") == (
        (0, 2, 4, 6),
        (1, 3, 5, 7),
        (8, 10, 12, 14),
        (9, 11, 13, 15),
    )
    assert axis_groups(STATE, "fsdp") == (tuple(range(8)), tuple(range(8, 16)))
    assert axis_groups(STATE, "data") == (tuple(range(16)),)


def test_an_axis_whose_name_ends_in_fsdp() -> None:
    """The complement of an extra axis called `my_fsdp` is `my_fsdp_fsdp`."""
    state = ParallelState(dp_size=4, extra_parallel_sizes=ExtraParallelSizes({"my_fsdp": 2}))
    assert axis_groups(state, "my_fsdp") == ((0, 1), (2, 3))
    assert axis_groups(state, "my_fsdp_fsdp") == ((0, 2), (1, 3))


degree = st.integers(1, 3)


@settings(deadline=None)  # a machine with other work takes longer
@given(shard=degree, replicate=degree, ulysses=degree, tensor=degree, pipeline=degree, ep=degree)
def test_groups_partition_the_world_and_agree_with_the_coordinates(
    *, shard: int, replicate: int, ulysses: int, tensor: int, pipeline: int, ep: int
) -> None:
    """On every axis each rank is in one group, at the place that its coordinate says."""
    state = ParallelState(
        dp_size=shard * ep * replicate,
        dp_replicate_size=replicate,
        ulysses_size=ulysses,
        tensor_size=tensor,
        pipeline_size=pipeline,
        extra_parallel_sizes=ExtraParallelSizes.of(ep=ep),
    )
    coordinates = [rank_coordinates(state, rank) for rank in range(state.world_size)]
    for name in axis_names(state):
        groups = axis_groups(state, name)
        assert sorted(rank for group in groups for rank in group) == list(range(state.world_size))
        for group in groups:
            assert [coordinates[rank][name] for rank in group] == list(range(len(group)))


def test_a_rank_outside_of_the_world_is_refused() -> None:
    """Both numbers are in the message."""
    with pytest.raises(ValueError, match="rank 16 is outside of a world of 16 ranks"):
        rank_coordinates(STATE, 16)
    with pytest.raises(ValueError, match="rank -1 is outside of a world of 16 ranks"):
        rank_coordinates(STATE, -1)


@pytest.mark.parametrize("rank", [True, 1.5, "1", None])
def test_a_rank_is_an_int(rank: Any) -> None:  # noqa: ANN401  # of any wrong type
    """1.5 has no place, and no half coordinates."""
    with pytest.raises(TypeError, match=r"rank_coordinates: rank: expected an int, got "):
        rank_coordinates(STATE, rank)


def test_an_unknown_axis_is_refused_with_the_nearest() -> None:
    """`ulyses` is not an axis."""
    with pytest.raises(UnknownAxisError, match=r"unknown axis 'ulyses'.*did you mean 'ulysses'\?"):
        axis_groups(STATE, "ulyses")
