"""The load-balancing loss against transformers' own, whole and in micro-batches."""

from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from engine_veomni.balancing import Balance
from engine_veomni.routing import Router
from engine_veomni.sampler_routes import RouterShape
from parallel_state.process_group import init_process_group
from rl_contracts.packing import PADDING_ID
from rl_contracts.train import PackedBatch

CPU = torch.device("cpu")
NUM_EXPERTS, NUM_LAYERS, TOP_K = 4, 2, 2
GATES = tuple(torch.nn.Identity() for _ in range(NUM_LAYERS))


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    init_process_group()
    yield
    dist.destroy_process_group()


def batch(name: str, num_tokens: int) -> PackedBatch:
    return PackedBatch(
        token_ids=torch.arange(num_tokens),
        positions=torch.arange(num_tokens),
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32),
        loss_mask=torch.zeros(num_tokens, dtype=torch.bool),
        advantages=torch.zeros(1),
        rollout_logprobs=torch.zeros(num_tokens),
        trajectory_ids=(name,),
    )


def logits_of(num_tokens: int) -> list[Tensor]:
    """By layer, leaning to expert 0, so that the load is far from even."""
    generator = torch.Generator().manual_seed(5)
    lean = torch.tensor([2.0, 0.5, 0.0, -1.0])
    return [
        (torch.randn(num_tokens, NUM_EXPERTS, generator=generator) + lean).requires_grad_()
        for _ in range(NUM_LAYERS)
    ]


def transformers_loss(layers: Sequence[Tensor]) -> Tensor:
    loss = load_balancing_loss_func(tuple(layers), NUM_EXPERTS, TOP_K)  # type: ignore[arg-type]
    assert isinstance(loss, Tensor)
    return loss


def ask(router: Router, logits: Sequence[Tensor]) -> None:
    """What VeOmni's layers do with their logits."""
    for gate, layer in zip(GATES, logits, strict=True):
        scores = layer.softmax(dim=1)
        router.on_router_forward(gate, scores, scores.topk(TOP_K).indices)


def engine_pass(batches: Sequence[PackedBatch], logits: Sequence[Sequence[Tensor]]) -> float:
    """The passes of `forward_backward` over micro-batches whose routers say `logits`."""
    shape = RouterShape(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K)
    router = Router(shape, replay="none", counts=False, balances=True, device=CPU)
    assert router.needs_counting
    router.start(batches)
    with torch.no_grad():
        for given, layers in zip(batches, logits, strict=True):
            with router.watching(given, purpose="count"):
                ask(router, layers)
    router.end_counting()
    for given, layers in zip(batches, logits, strict=True):
        with router.watching(given, purpose="train"):
            ask(router, layers)
            router.balancing_share().backward()
    return router.balancing_loss()


def test_by_hand() -> None:
    """Two experts, one choice each. Both tokens choose expert 0, with 3/4 and 2/3: f = (1, 0),
    p = (17/24, 7/24), and the loss 2 * 17/24. Choices that are even give 1, whatever p is.
    """
    scores = torch.tensor([[3 / 4, 1 / 4], [2 / 3, 1 / 3]], requires_grad=True)
    included = torch.tensor([True, True])
    for chosen, expected in (([[0], [0]], 17 / 12), ([[0], [1]], 1.0)):
        balance = Balance(num_experts=2, num_layers=1, device=CPU)
        balance.count([torch.tensor(chosen)], included)
        balance.agree()
        assert balance.share(scores, included).item() == pytest.approx(expected)


@pytest.mark.parametrize("lengths", [(7,), (3, 4), (1, 2, 4)])
def test_value_and_gradient_are_transformers_however_the_batch_is_split(
    lengths: tuple[int, ...],
) -> None:
    """In one micro-batch, in two, and in three: those of all seven tokens at once."""
    whole = logits_of(7)
    expected = transformers_loss(whole)
    expected.backward()
    assert all(layer.grad is not None and layer.grad.abs().max() > 1e-3 for layer in whole)
    given = logits_of(7)
    pieces = list(zip(*(layer.split(lengths) for layer in given), strict=True))
    batches = [batch(str(index), length) for index, length in enumerate(lengths)]
    assert engine_pass(batches, pieces) == pytest.approx(expected.item(), rel=1e-6)
    for layer, reference in zip(given, whole, strict=True):
        torch.testing.assert_close(layer.grad, reference.grad, atol=1e-7, rtol=1e-5)


def test_the_losses_of_micro_batches_would_not_add_up() -> None:
    """Why the choices are counted first: a mean of transformers' own over the parts is another."""
    whole = logits_of(7)
    expected = transformers_loss(whole)
    parts = [
        transformers_loss([layer[rows] for layer in whole]) for rows in (slice(0, 3), slice(3, 7))
    ]
    mean = (3 * parts[0] + 4 * parts[1]) / 7
    assert (mean - expected).abs().item() > 1e-3


def test_padding_counts_for_nothing() -> None:
    """The token that fills an empty micro-batch has no part in it, as transformers' mask says."""
    whole, padding = logits_of(7), logits_of(1)
    expected = transformers_loss(whole)
    batches = [batch("a", 7), batch(PADDING_ID, 1)]
    assert engine_pass(batches, [whole, padding]) == pytest.approx(expected.item(), rel=1e-6)
    assert all(layer.grad is not None and not layer.grad.any() for layer in padding)


def test_a_layer_that_is_computed_again_counts_once() -> None:
    """Activation checkpointing asks the routers again in the backward pass."""
    shape = RouterShape(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K)
    router = Router(shape, replay="none", counts=False, balances=True, device=CPU)
    given, logits = batch("a", 7), logits_of(7)
    router.start([given])
    with torch.no_grad(), router.watching(given, purpose="count"):
        ask(router, logits)
    router.end_counting()
    with router.watching(given, purpose="train"):
        ask(router, logits)
        share = router.balancing_share()
        ask(router, logits)
        assert len(router._shares) == NUM_LAYERS
    assert router.balancing_loss() == pytest.approx(share.item())


def test_a_router_that_did_not_ask_is_an_error() -> None:
    """A loss that balances half of the layers would look like one that balances all."""
    shape = RouterShape(num_layers=NUM_LAYERS + 1, num_experts=NUM_EXPERTS, top_k=TOP_K)
    router = Router(shape, replay="none", counts=False, balances=True, device=CPU)
    given = batch("a", 7)
    router.start([given])
    router.end_counting()
    with router.watching(given, purpose="train"):
        ask(router, logits_of(7))
        with pytest.raises(RuntimeError, match=r"expected the scores of 3 layers, got those of 2"):
            router.balancing_share()
