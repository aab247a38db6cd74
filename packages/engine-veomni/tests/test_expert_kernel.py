"""Experts as grouped products, against the sum over experts written out."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from engine_veomni.expert_kernel import collect, sort_by_expert, spread, swiglu_experts

CHOSEN = torch.tensor([[3, 0], [0, 1], [3, 1]])
"""Experts of three tokens; nobody chose expert 2."""


def by_hand(
    tokens: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor
) -> Tensor:
    """Each token through each of its experts, one after the other."""
    rows = []
    for token, experts, shares in zip(tokens, chosen.tolist(), weights, strict=True):
        output = torch.zeros_like(token)
        for expert, share in zip(experts, shares, strict=True):
            gate, up = (gate_up[expert] @ token).chunk(2)
            output = output + share * (down[expert] @ (silu(gate) * up))
        rows.append(output)
    return torch.stack(rows)


def test_rows_are_sorted_by_expert_and_find_their_way_back() -> None:
    """Expert 0 has the second slot of token 0 and the first of token 1; expert 2 has nothing."""
    routes = sort_by_expert(CHOSEN, 4)
    assert routes.order.tolist() == [1, 2, 3, 5, 0, 4]
    assert routes.ends.tolist() == [2, 4, 4, 6]
    assert routes.places.tolist() == [[4, 0], [1, 2], [5, 3]]
    tokens = torch.tensor([[1.0], [10.0], [100.0]])
    rows = spread(tokens, routes)
    assert rows.flatten().tolist() == [1.0, 10.0, 10.0, 100.0, 1.0, 100.0]
    assert torch.equal(collect(rows, routes), 2 * tokens)


def test_outputs_and_gradients_are_those_of_the_sum_over_experts() -> None:
    """Also the gradient of the weights, and 0 for the expert that nobody chose."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for grouped in (True, False):
        generator.manual_seed(0)
        inputs = [
            torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
            for shape in ((3, 8), (3, 2), (4, 16, 8), (4, 8, 8))
        ]
        tokens, weights, gate_up, down = inputs
        if grouped:
            routes = sort_by_expert(CHOSEN, 4)
            rows, shares = spread(tokens, routes), weights.flatten()[routes.order]
            singles = [tensor.float() for tensor in (rows, shares, gate_up, down)]
            output = collect(
                swiglu_experts(singles[0], singles[1], routes.ends, singles[2], singles[3]), routes
            )
        else:
            output = by_hand(tokens, weights, gate_up, down, CHOSEN)
        output.sin().sum().backward()
        results.append([output.double(), *(tensor.grad for tensor in inputs)])
    for found, wanted in zip(*results, strict=True):
        assert found is not None
        assert wanted is not None
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    gate_up_gradient = results[0][3]
    assert gate_up_gradient is not None
    assert not gate_up_gradient[2].any()


def test_a_pass_can_be_repeated_bit_for_bit() -> None:
    """In bfloat16, where every other order of a sum is another sum."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(40, 8, generator=generator).argsort(dim=1)[:, :4]
    routes = sort_by_expert(chosen, 8)
    results = []
    for _ in range(2):
        generator.manual_seed(2)
        inputs = [
            torch.randn(shape, generator=generator).bfloat16().requires_grad_()
            for shape in ((40, 16), (160,), (8, 32, 16), (8, 16, 16))
        ]
        output = collect(
            swiglu_experts(spread(inputs[0], routes), inputs[1], routes.ends, *inputs[2:]), routes
        )
        output.float().square().sum().backward()
        results.append([output, *(tensor.grad for tensor in inputs)])
    for first, second in zip(*results, strict=True):
        assert first is not None
        assert second is not None
        assert torch.equal(first, second)


def test_unaligned_rows_are_an_error() -> None:
    """torch's product wants rows of whole 16 bytes; engines refuse such a model before."""
    with pytest.raises(RuntimeError, match="16 bytes"):
        swiglu_experts(
            torch.ones(2, 3),
            torch.ones(2),
            torch.tensor([2]),
            torch.ones(1, 8, 3),
            torch.ones(1, 3, 4),
        )
