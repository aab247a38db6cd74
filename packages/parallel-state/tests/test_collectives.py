"""Sums over real gloo ranks, against numbers worked out by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel_state.collectives import clip_grads_, share_of_mean

RunRanks = Callable[[str, int, list[str]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def two_ranks(run_ranks: RunRanks) -> list[dict[str, Any]]:
    names = [
        "sums",
        "sequence_parallel_loss",
        "uneven_loss",
        "nothing_to_learn",
        "expert_norms",
        "pending_sum",
    ]
    return run_ranks("collectives", 2, names)


@pytest.fixture(scope="module")
def four_ranks(run_ranks: RunRanks) -> list[dict[str, Any]]:
    return run_ranks("collectives", 4, ["replicated_norm", "hybrid_norm", "mixed_norm", "splits"])


def test_sums_are_new_and_exact(two_ranks: list[dict[str, Any]]) -> None:
    """1 + 2 = 3 and 10 + 10 = 20 in int64, 0.5 + 1 = 1.5, and what was given is left alone."""
    assert [result["sums"] for result in two_ranks] == [
        ["torch.int64", [3, 20], [1, 10], 1.5],
        ["torch.int64", [3, 20], [2, 10], 1.5],
    ]


def test_sequence_parallel_ranks_count_in_the_loss_scale(two_ranks: list[dict[str, Any]]) -> None:
    """Two ranks share a sequence, loss 1 per token: the mean's gradient is 1, not 1/2 (A08)."""
    assert [result["sequence_parallel_loss"] for result in two_ranks] == [1.0, 1.0]


@pytest.mark.slow
def test_eight_sequence_parallel_ranks(run_ranks: RunRanks) -> None:
    """8 ranks, SP 8, DP 1, 100 tokens each of loss 1: 1.0, not 0.125 (A08)."""
    results = run_ranks("collectives", 8, ["sequence_parallel_loss"])
    assert [result["sequence_parallel_loss"] for result in results] == [1.0] * 8


def test_token_mean_over_uneven_ranks(two_ranks: list[dict[str, Any]]) -> None:
    """2 tokens of loss 1 and 6 of loss 3 have the mean 20/8 = 2.5, not 2.0 (A07)."""
    assert [result["uneven_loss"] for result in two_ranks] == [2.5, 2.5]


def test_the_gradient_does_not_depend_on_the_split(four_ranks: list[dict[str, Any]]) -> None:
    """The mean of 1 to 24 is 12.5, however it is cut.

    Over data-parallel ranks, replicas, sequence-parallel ranks and micro-batches (A06, A07, A08).
    """
    for result in four_ranks:
        assert result["splits"] == pytest.approx([12.5] * 18, rel=1e-6)


def test_no_token_at_all_gives_a_zero_gradient(two_ranks: list[dict[str, Any]]) -> None:
    """Nothing to learn from is 0, not NaN, and every rank still takes part (A11)."""
    assert [result["nothing_to_learn"] for result in two_ranks] == [0.0, 0.0]


def test_share_of_mean_does_not_depend_on_the_split() -> None:
    """100 tokens of mean 0.5 and 900 of mean 0.3 have the mean 0.32, not 0.40 (A06)."""
    shares = [
        share_of_mean(torch.tensor(total), global_count=1000, averaged_over=1)
        for total in (50.0, 270.0)
    ]
    assert sum(shares).item() == pytest.approx(0.32)  # type: ignore[union-attr]


def test_replicas_count_once_in_the_norm(four_ranks: list[dict[str, Any]]) -> None:
    """Four replicas of a gradient of norm 5 have the norm 5, not 10 (A38)."""
    assert [result["replicated_norm"] for result in four_ranks] == [5.0] * 4


def test_shards_of_replicas_count_once(four_ranks: list[dict[str, Any]]) -> None:
    """(1, 2 | 2, 4) on two replicas: the root of 1 + 4 + 4 + 16."""
    assert [result["hybrid_norm"] for result in four_ranks] == [5.0] * 4


def test_replicas_experts_and_dense_parameters_in_one_norm(
    four_ranks: list[dict[str, Any]],
) -> None:
    """Expert norms 3 and 4 and dense 12, all of it twice: 13 (A38)."""
    assert [result["mixed_norm"] for result in four_ranks] == [13.0] * 4


def test_experts_and_dense_parameters_in_one_norm(two_ranks: list[dict[str, Any]]) -> None:
    """Expert norms 3 and 4: 5 with dense 0 (A38), 13 with dense 12, on every rank."""
    for result in two_ranks:
        norms = result["expert_norms"]
        assert norms["dense 0"] == 5.0
        assert norms["dense 12"] == 13.0
        assert norms["plain tensors"] == 5.0
        assert math.isinf(norms["infinite"])


def test_a_rank_without_gradient_still_takes_part(two_ranks: list[dict[str, Any]]) -> None:
    """If the expert of rank 1 saw no token, the norm is that of rank 0's, 3."""
    assert [result["expert_norms"]["rank 1 without gradient"] for result in two_ranks] == [3.0, 3.0]


def test_clipping_scales_all_meshes_by_one_factor(two_ranks: list[dict[str, Any]]) -> None:
    """A norm of 13 clipped to 6.5 is 6.5, and a limit above the norm changes nothing."""
    for result in two_ranks:
        assert result["expert_norms"]["clipped to 6.5"] == 6.5
        assert result["expert_norms"]["not clipped to 100"] == 6.5


def test_a_gradient_that_is_not_reduced_is_refused(two_ranks: list[dict[str, Any]]) -> None:
    """A pending sum has no norm yet."""
    assert two_ranks[0]["pending_sum"] == (
        "global_grad_norm: expected a gradient placed like its parameter and no pending sum, got "
        "a gradient on (Partial(sum),) for a parameter on (Replicate(),); reduce it first"
    )


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_limit_that_is_not_positive_is_refused(max_norm: float) -> None:
    """Clipping to 0 would throw the gradient away."""
    with pytest.raises(ValueError, match=r"expected max_norm above 0, got"):
        clip_grads_([], norm=torch.tensor(1.0), max_norm=max_norm)
