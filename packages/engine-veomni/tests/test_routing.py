"""Routes that are remembered, replayed and counted, without a model."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine_veomni.routing import Router
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


def run(
    router: Router, given: PackedBatch, *, trains: bool, chosen: tuple[Tensor, ...]
) -> list[Tensor]:
    with router.watching(given, trains=trains):
        return [
            router.on_router_forward(gate, SCORES, indices)
            for gate, indices in zip(GATES, chosen, strict=True)
        ]


def test_each_trajectory_is_replayed_wherever_it_is_packed() -> None:
    """Rows a (2 tokens) and b (1 token) come back in the other order, layer by layer."""
    router = Router(replays=True, counts=False)
    run(router, batch("a", "b", lengths=(2, 1)), trains=False, chosen=CHOSEN)
    turned = batch("b", "a", lengths=(1, 2))
    router.start([turned])
    other = (torch.full((3, 1), 2), torch.full((3, 1), 2))
    first, second = run(router, turned, trains=True, chosen=other)
    assert first.tolist() == [[1], [0], [0]]
    assert second.tolist() == [[2], [1], [0]]
    assert first.dtype == torch.int64


def test_a_trajectory_without_routes_is_refused() -> None:
    """One that is unknown, forgotten, or has another length now."""
    router = Router(replays=True, counts=False)
    run(router, batch("a", "b", lengths=(2, 1)), trains=False, chosen=CHOSEN)
    with pytest.raises(
        ValueError, match=r"on rank 0, trajectory c was not in the last call of log"
    ):
        router.start([batch("a", "c", lengths=(2, 1))])
    with pytest.raises(ValueError, match=r"trajectory b has 2 tokens, and had 1 in the last call"):
        router.start([batch("b", lengths=(2,))])
    router.forget()
    with pytest.raises(
        ValueError, match=r"trajectory a was not in .* call logprobs with all micro"
    ):
        router.start([batch("a", lengths=(2,))])


def test_loads_and_entropies_by_hand() -> None:
    """Layer 0: experts 0, 1, 2 have 2, 1 and 0 of 3 tokens. Two scores of a half have ln 2."""
    router = Router(replays=False, counts=True)
    with pytest.raises(RuntimeError, match="nothing was counted yet"):
        router.statistics()
    given = batch("a", "b", lengths=(2, 1))
    for _ in range(2):
        router.start([given])
        # twice as large sums, the same means; a second start forgets the first
        for _ in range(2):
            found = run(router, given, trains=True, chosen=CHOSEN)
            assert all(map(torch.equal, found, CHOSEN))
    statistics = router.statistics()
    assert statistics.load_max_over_mean == (2.0, 1.0)
    assert statistics.unused_experts == (1, 0)
    assert statistics.entropy == pytest.approx([2 / 3 * math.log(2)] * 2)


def test_a_layer_that_is_computed_again_is_counted_once() -> None:
    """Activation checkpointing asks the router again in the backward pass."""
    router = Router(replays=False, counts=True)
    given = batch("a", lengths=(3,))
    router.start([given])
    with router.watching(given, trains=True):
        for gate in (*GATES, *reversed(GATES)):
            router.on_router_forward(gate, SCORES, CHOSEN[GATES.index(gate)])
    assert router.statistics().load_max_over_mean == (2.0, 1.0)
