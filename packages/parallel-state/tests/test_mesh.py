"""Meshes on real gloo ranks, against groups written by hand."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel_state import ParallelState
from parallel_state.mesh import build_meshes

RunRanks = Callable[[str, int, list[str]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def two_ranks(run_ranks: RunRanks) -> list[dict[str, Any]]:
    names = ["one_axis", "wrong_world", "shard_size_one", "unknown_axis", "disagreement"]
    return run_ranks("meshes", 2, [*names, "device_types"])


def test_two_ranks_share_the_shards_and_split_the_experts(two_ranks: list[dict[str, Any]]) -> None:
    """With dp 2 and ep 2, each rank is alone on `ep_fsdp`."""
    for rank, result in enumerate(two_ranks):
        assert result["one_axis"] == {
            "groups": {
                "pipeline": [rank],
                "dp_replicate": [rank],
                "dp_shard": [0, 1],
                "ulysses": [rank],
                "tensor": [rank],
                "fsdp": [0, 1],
                "data": [0, 1],
                "ep": [0, 1],
                "ep_fsdp": [rank],
            },
            "fsdp": ["fsdp"],
            "ep_fsdp": ["ep_fsdp"],
        }


def test_a_world_of_another_size_is_refused_with_both_numbers(
    two_ranks: list[dict[str, Any]],
) -> None:
    """Meshes for 4 ranks are not built on 2 (A37: the error names both)."""
    assert two_ranks[0]["wrong_world"] == (
        "this ParallelState needs 4 ranks (pipeline 1 * dp_replicate 1 * dp_shard 4 * ulysses 1 "
        "* tensor 1), got a world of 2; ParallelState.for_world(2, ...) derives dp_size from the "
        "world"
    )


def test_ranks_with_different_states_are_refused(two_ranks: list[dict[str, Any]]) -> None:
    """Each state fits the world, and the groups would be different ones on every rank."""
    for result in two_ranks:
        assert result["disagreement"] == (
            "build_meshes: expected an equal state on every rank, got rank 0: "
            f"{ParallelState(dp_size=2)!r}; rank 1: {ParallelState(ulysses_size=2)!r}"
        )


def test_a_device_type_that_is_not_there_is_refused(two_ranks: list[dict[str, Any]]) -> None:
    """`gpu` is no type, `cpu:0` is a device, and this machine has no accelerator."""
    gpu, index, *cuda = two_ranks[0]["device_types"]
    assert gpu.startswith("ValueError: build_meshes: device_type: expected one that the process")
    assert gpu.endswith(", got 'gpu'")
    assert index.endswith(", got 'cpu:0'")
    if not torch.cuda.is_available():
        assert cuda == [
            "RuntimeError: build_meshes: there is no device of the type 'cuda' in this process"
        ]


def test_replicas_of_one_shard_still_average_their_gradients(
    two_ranks: list[dict[str, Any]],
) -> None:
    """On data 1 and 2 both replicas step by the mean, 1.5 (A37)."""
    assert [result["shard_size_one"] for result in two_ranks] == [-1.5, -1.5]


def test_replicas_get_two_dimensional_meshes(run_ranks: RunRanks) -> None:
    """Two replicas of two shards: two axes for FSDP2, one of them the replicas."""
    results = [result["replicas"] for result in run_ranks("meshes", 4, ["replicas"])]
    assert [result["groups"] for result in results] == [
        {
            "pipeline": [rank],
            "dp_replicate": [rank % 2, rank % 2 + 2],
            "dp_shard": half,
            "ulysses": [rank],
            "tensor": [rank],
            "fsdp": half,
            "data": [0, 1, 2, 3],
            "ep": half,
            "ep_fsdp": [rank],
        }
        for rank, half in enumerate([[0, 1], [0, 1], [2, 3], [2, 3]])
    ]
    assert results[0]["fsdp"] == [["dp_replicate", "fsdp"], [[0, 1], [2, 3]]]
    assert results[3]["ep_fsdp"] == [["dp_replicate", "ep_fsdp"], [[1], [3]]]


def _partitions(results: list[dict[str, Any]], name: str) -> dict[str, list[list[int]]]:
    """The groups that the ranks saw on every axis, in which every rank is in its own."""
    found: dict[str, list[list[int]]] = {}
    for rank, result in enumerate(results):
        for axis, group in result[name]["groups"].items():
            assert rank in group
            if group not in found.setdefault(axis, []):
                found[axis].append(group)
    return found


@pytest.mark.slow
def test_eight_ranks(run_ranks: RunRanks) -> None:
    """Every group of 8 ranks is that of a drawing by hand: Ulysses, stages, two extra axes."""
    results = run_ranks("meshes", 8, ["two_extra_axes", "every_dense_axis"])
    alone = [[rank] for rank in range(8)]
    everyone = [[0, 1, 2, 3, 4, 5, 6, 7]]
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert _partitions(results, "two_extra_axes") == {
        "pipeline": alone,
        "dp_replicate": alone,
        "dp_shard": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "ulysses": pairs,
        "tensor": alone,
        "fsdp": everyone,
        "data": everyone,
        "ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "ep_fsdp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "emb": pairs,
        "emb_fsdp": [[0, 2, 4, 6], [1, 3, 5, 7]],
    }
    every_second = [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert _partitions(results, "every_dense_axis") == {
        "pipeline": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "dp_replicate": alone,
        "dp_shard": every_second,
        "ulysses": alone,
        "tensor": pairs,
        "fsdp": every_second,
        "data": every_second,
        "ep": alone,
        "ep_fsdp": every_second,
    }


def test_no_process_group_is_an_error_that_says_what_to_call() -> None:
    """Meshes need a process group."""
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group first"):
        build_meshes(ParallelState(), "cpu")


def test_only_a_state_has_meshes() -> None:
    """A dict of degrees is refused by name."""
    with pytest.raises(TypeError, match=r"expected a ParallelState, got \{'dp_size': 2\} \(dict\)"):
        build_meshes({"dp_size": 2}, "cpu")  # type: ignore[arg-type]


def test_unknown_axis_of_the_meshes_names_the_nearest(two_ranks: list[dict[str, Any]]) -> None:
    """Groups are asked for by name, and a wrong one gets the names that there are."""
    assert two_ranks[0]["unknown_axis"] == (
        "unknown axis 'epp'; this run has: pipeline, dp_replicate, dp_shard, ulysses, tensor, "
        "fsdp, data, ep, ep_fsdp; did you mean 'ep'?"
    )


def test_values_load_no_torch() -> None:
    """A launcher can plan a run in a process that never imports torch."""
    program = (
        "import sys; from parallel_state import ParallelState, rank_coordinates; "
        "rank_coordinates(ParallelState.for_world(8), 7); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"
