"""Sums over real gloo ranks, against numbers worked out by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel_state.collectives import (
    ShardedParameters,
    clip_grads_,
    global_grad_norm,
    share_of_mean,
)

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
        "sums_refused",
        "sum_of_another_memory_order",
        "norms_refused",
        "wide_gradients",
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
        "a gradient on (Partial(sum),) over ('fsdp',) for a parameter on (Replicate(),) over "
        "('fsdp',); reduce it first"
    )


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_limit_that_is_not_positive_is_refused(max_norm: float) -> None:
    """Clipping to 0 would throw the gradient away."""
    with pytest.raises(ValueError, match=r"expected max_norm above 0, got"):
        clip_grads_([], norm=torch.tensor(1.0), max_norm=max_norm)


def test_what_does_not_add_up_is_refused_on_all_ranks(two_ranks: list[dict[str, Any]]) -> None:
    """Without it gloo ends the process, or adds the bits of one type to those of another."""
    said = two_ranks[0]["sums_refused"]
    assert two_ranks[1]["sums_refused"] == said
    start = "ValueError: global_sum: expected the same type and shape on every rank, got "
    assert said["shape"] == start + "rank 0: torch.float32 (2,); rank 1: torch.float32 (3,)"
    assert said["type"] == start + "rank 0: torch.int64 (); rank 1: torch.float32 ()"
    assert said["no group"] == (
        "TypeError: global_sum: expected a process group that this rank is in, such as "
        "Meshes.group('data'), got None (NoneType)"
    )
    real = "TypeError: global_sum: expected a plain tensor of real numbers, got "
    assert said["complex"] == real + "torch.complex64 (Tensor)"
    assert said["sharded"] == real + "torch.float32 (DTensor)"


def test_the_order_in_memory_does_not_matter(two_ranks: list[dict[str, Any]]) -> None:
    """Twice 0 to 5, although one rank holds it transposed."""
    for result in two_ranks:
        assert result["sum_of_another_memory_order"] == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


def test_a_piece_is_counted_once(two_ranks: list[dict[str, Any]]) -> None:
    """A group beside the DTensor's own axis, over the same ranks, would double its square."""
    said = two_ranks[0]["norms_refused"]
    assert said["over one axis twice"] == (
        "ValueError: global_grad_norm: expected groups that share this rank alone, got one of the "
        "ranks [0, 1] and one of [0, 1]: give no group for an axis that the DTensor is sharded "
        "over already"
    )
    assert said["sparse"] == (
        "ValueError: global_grad_norm: expected a dense gradient, got one of layout "
        "torch.sparse_coo"
    )


def test_gradients_of_wider_types(two_ranks: list[dict[str, Any]]) -> None:
    """(3, 4) in float64 and 3 + 4i have the norm 5."""
    assert [result["wide_gradients"] for result in two_ranks] == [[5.0, 5.0]] * 2


def _one() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([3.0])
    return parameter


def test_a_parameter_that_is_there_twice_is_refused() -> None:
    """Tied weights would count twice in the norm and be scaled twice."""
    tied = _one()
    twice = [ShardedParameters(parameters=[tied]), ShardedParameters(parameters=[_one(), tied])]
    message = r"expected each parameter once, got parameter 1 of part 1, of shape \(1,\), a second"
    with pytest.raises(ValueError, match=message):
        global_grad_norm(twice, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        clip_grads_(twice, norm=torch.tensor(6.0), max_norm=1.0)


def test_what_can_be_read_once_only_is_refused() -> None:
    """The norm would read it, and clipping find nothing to scale."""
    parts: Any = (ShardedParameters(parameters=[each]) for each in [_one()])
    with pytest.raises(TypeError, match=r"expected a list or tuple of .*, got generator$"):
        global_grad_norm(parts, device=torch.device("cpu"))
    parameters: Any = torch.nn.Linear(1, 1).parameters()
    with pytest.raises(TypeError, match=r"such as list\(model.parameters\(\)\), got generator$"):
        ShardedParameters(parameters=parameters)
    with pytest.raises(TypeError, match=r"expected a list or tuple of tensors, .*, got Parameter$"):
        ShardedParameters(parameters=_one())  # type: ignore[arg-type]
    groups: Any = [None]
    with pytest.raises(TypeError, match=r"groups: expected a process group .*, got None"):
        ShardedParameters(parameters=[_one()], groups=groups)


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ({"global_count": -5}, ValueError, "global_count: expected an int of at least 0, got -5"),
        ({"global_count": True}, TypeError, r"global_count: expected an int, got True \(bool\)"),
        ({"global_count": torch.tensor(4)}, TypeError, r"got tensor\(4\) \(Tensor\)"),
        ({"averaged_over": 0}, ValueError, "averaged_over: expected an int of at least 1, got 0"),
        ({"averaged_over": 2.5}, TypeError, r"averaged_over: .* got 2\.5 \(float\)"),
    ],
)
def test_counts_that_count_nothing_are_refused(
    counts: dict[str, Any], error: type[Exception], message: str
) -> None:
    """A negative count was taken for 1, and averaging over 0 ranks threw the loss away."""
    with pytest.raises(error, match=message):
        share_of_mean(torch.tensor(8.0), **{"global_count": 4, "averaged_over": 1, **counts})


def test_a_sum_over_no_tokens_has_no_share() -> None:
    """If the count is 0 the share is 0, whatever the sum, and the graph is kept."""
    weight = torch.tensor(8.0, requires_grad=True)
    share = share_of_mean(weight * 1.0, global_count=0, averaged_over=2)
    share.backward()
    assert share.item() == 0.0
    assert weight.grad is not None
    assert weight.grad.item() == 0.0
