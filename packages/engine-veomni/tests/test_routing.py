"""Routes that are remembered, replayed and counted, without a model."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine_veomni.routing import Purpose, Router
from engine_veomni.sampler_routes import RouterShape
from parallel_state.process_group import init_process_group
from rl_contracts.train import PackedBatch

GATES = (torch.nn.Identity(), torch.nn.Identity())
"""Stand for the routers of two layers."""
SCORES = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
CHOSEN = (torch.tensor([[0], [0], [1]]), torch.tensor([[1], [0], [2]]))


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    init_process_group()
    yield
    dist.destroy_process_group()


def batch(*names: str, lengths: tuple[int, ...]) -> PackedBatch:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    num_tokens = int(ends[-1])
    return PackedBatch(
        token_ids=torch.arange(num_tokens),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=ends.to(torch.int32),
        loss_mask=torch.zeros(num_tokens, dtype=torch.bool),
        advantages=torch.zeros(len(lengths)),
        rollout_logprobs=torch.zeros(num_tokens),
        trajectory_ids=names,
    )


def router_of(**settings: Any) -> Router:  # noqa: ANN401
    """Two layers of three experts, one of which a token goes to."""
    return Router(
        RouterShape(num_layers=2, num_experts=3, top_k=1),
        device=torch.device("cpu"),
        **{"replay": "none", "counts": False, "balances": False, **settings},
    )


def run(
    router: Router, given: PackedBatch, *, purpose: Purpose, chosen: tuple[Tensor, ...]
) -> list[Tensor]:
    with router.watching(given, purpose=purpose):
        return [
            router.on_router_forward(gate, SCORES, indices)
            for gate, indices in zip(GATES, chosen, strict=True)
        ]


def test_each_trajectory_is_replayed_wherever_it_is_packed() -> None:
    """Rows a (2 tokens) and b (1 token) come back in the other order, layer by layer."""
    router = router_of(replay="logprobs")
    run(router, batch("a", "b", lengths=(2, 1)), purpose="score", chosen=CHOSEN)
    turned = batch("b", "a", lengths=(1, 2))
    router.start([turned])
    other = (torch.full((3, 1), 2), torch.full((3, 1), 2))
    first, second = run(router, turned, purpose="train", chosen=other)
    assert first.tolist() == [[1], [0], [0]]
    assert second.tolist() == [[2], [1], [0]]
    assert first.dtype == torch.int64


def test_a_trajectory_without_routes_is_refused() -> None:
    """One that is unknown, forgotten, or has another length now."""
    router = router_of(replay="logprobs")
    run(router, batch("a", "b", lengths=(2, 1)), purpose="score", chosen=CHOSEN)
    with pytest.raises(
        ValueError, match=r"on rank 0, trajectory c was not in the last call of log"
    ):
        router.start([batch("a", "c", lengths=(2, 1))])
    with pytest.raises(ValueError, match=r"trajectory b has 2 tokens, and had 1 in the last call"):
        router.start([batch("b", lengths=(2,))])
    router.begin_scoring([])
    with pytest.raises(
        ValueError, match=r"trajectory a was not in .* call logprobs with all micro"
    ):
        router.start([batch("a", lengths=(2,))])


def test_loads_and_entropies_by_hand() -> None:
    """Layer 0: experts 0, 1, 2 have 2, 1 and 0 of 3 tokens. Two scores of a half have ln 2."""
    router = router_of(counts=True)
    with pytest.raises(RuntimeError, match="nothing was counted yet"):
        router.statistics()
    given = batch("a", "b", lengths=(2, 1))
    for _ in range(2):
        router.start([given])
        # twice as large sums, the same means; a second start forgets the first
        for _ in range(2):
            found = run(router, given, purpose="train", chosen=CHOSEN)
            assert all(map(torch.equal, found, CHOSEN))
    statistics = router.statistics()
    assert statistics.load_max_over_mean == (2.0, 1.0)
    assert statistics.unused_experts == (1, 0)
    assert statistics.entropy == pytest.approx([2 / 3 * math.log(2)] * 2)


def test_a_layer_that_is_computed_again_is_counted_once() -> None:
    """Activation checkpointing asks the router again in the backward pass."""
    router = router_of(counts=True)
    given = batch("a", lengths=(3,))
    router.start([given])
    with router.watching(given, purpose="train"):
        for gate in (*GATES, *reversed(GATES)):
            router.on_router_forward(gate, SCORES, CHOSEN[GATES.index(gate)])
    assert router.statistics().load_max_over_mean == (2.0, 1.0)


def routed(given: PackedBatch, routes: list[list[list[int]]]) -> PackedBatch:
    return replace(given, routed_experts=torch.tensor(routes, dtype=torch.int16))


def test_the_samplers_routes_are_replayed_where_it_says_some() -> None:
    """In both passes; the last token of a row goes where the router sends it."""
    router = router_of(replay="rollout")
    given = routed(batch("a", "b", lengths=(2, 1)), [[[2], [0]], [[-1], [-1]], [[-1], [-1]]])
    router.begin_scoring([given])
    router.start([given])
    for purpose in ("score", "train"):
        first, second = run(router, given, purpose=purpose, chosen=CHOSEN)
        assert first.tolist() == [[2], [0], [1]]
        assert second.tolist() == [[0], [0], [2]]
        assert first.dtype == torch.int64


@pytest.mark.parametrize(
    ("routes", "problem"),
    [
        (None, r"\(trajectories a\): it carries no routes .*return_routed_experts"),
        ([[[0], [3]], [[-1], [-1]]], r"token 0 names the experts \[3\] in layer 1, .* 0 to 2"),
        ([[[0], [-1]], [[-1], [-1]]], r"token 0 names the experts \[-1\] in layer 1"),
        (
            [[[-1], [-1]], [[0], [0]]],
            r"token 0 names the experts \[-1\] .* the last token of a seq",
        ),
        ([[[0]], [[-1]]], r"expected .* of shape \(2, 2, 1\), .* got \(2, 1, 1\); do sampler and"),
    ],
    ids=["none", "too-high", "half-known", "gap", "other-model"],
)
def test_routes_that_are_not_of_this_model_are_refused(
    routes: list[list[list[int]]] | None, problem: str
) -> None:
    """A sampler that reports none, or others than it used, would be trained with in silence."""
    router = router_of(replay="rollout")
    given = batch("a", lengths=(2,))
    given = given if routes is None else routed(given, routes)
    with pytest.raises(ValueError, match=rf"^logprobs: on rank 0, micro-batch 0 .*{problem}"):
        router.begin_scoring([given])
    with pytest.raises(ValueError, match=r"^forward_backward: .* or set router_replay to 'none'$"):
        router.start([given])


def test_an_expert_twice_for_one_token_is_refused() -> None:
    """As a sampler's buffer of zeros that nobody filled."""
    router = Router(
        RouterShape(num_layers=2, num_experts=3, top_k=2),
        replay="rollout",
        counts=False,
        balances=False,
        device=torch.device("cpu"),
    )
    given = routed(batch("a", lengths=(2,)), [[[0, 2], [1, 1]], [[-1, -1], [-1, -1]]])
    with pytest.raises(
        ValueError, match=r"token 0 names the experts \[1, 1\] in layer 1, .* 2 diff"
    ):
        router.start([given])
