"""Copies learnt from a model's own loader; a small model with the tricks of vLLM's, no vLLM."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from rollout_vllm.copy_plan import CopyPlan, Piece, PlanError, record_plan
from rollout_vllm.headers import TensorHeader
from rollout_vllm.torch_headers import tensor_headers


class Stacked(nn.Module):
    """Stacks q and v, takes half of the columns of o, and both experts into one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.qv = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.o = nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        self.w13 = nn.Parameter(torch.zeros(2, 4, 3), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(1), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            if name == "q":
                self.qv.data.narrow(0, 0, 4).copy_(weight)
            elif name == "v":
                self.qv.data[4:].copy_(weight)
            elif name == "o":
                self.o.data.copy_(weight.narrow(1, 2, 2))
            elif name == "scale":
                self.scale.data.copy_(weight)
            elif name == "experts.gate_up":  # fused and transposed: [expert, hidden, 2 x width]
                gate, up = weight.transpose(-1, -2).chunk(2, dim=1)
                for expert in range(2):
                    self.w13.data[expert, :2].copy_(gate[expert])
                    self.w13.data[expert, 2:].copy_(up[expert])
            elif name == "computed":
                self.scale.data.copy_(weight * 2)


def checkpoint() -> dict[str, Tensor]:
    return {
        "q": torch.randn(4, 4),
        "v": torch.randn(2, 4),
        "o": torch.randn(4, 4),
        "scale": torch.randn(1),
        "experts.gate_up": torch.randn(2, 3, 4),
    }


def planned(weights: dict[str, Tensor], model: nn.Module) -> CopyPlan:
    return record_plan(model, tensor_headers(weights.items(), dtype="float32"))


def pieces(weights: dict[str, Tensor], rows: int) -> Iterable[Piece]:
    for name, tensor in weights.items():
        for start in range(0, tensor.shape[0], rows):
            yield Piece(name, tensor[start : start + rows], start, tensor.shape[0])


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_the_copies_do_what_the_loader_does(rows: int) -> None:
    """However the tensors are cut into rows, every parameter equals the loader's own."""
    torch.manual_seed(0)
    first, second = checkpoint(), checkpoint()
    expected, model = Stacked(), Stacked()
    plan = planned(first, model)
    assert all(not parameter.any() for parameter in model.parameters())  # nothing moved yet
    assert plan.num_copies == 8
    for weights in (first, second):
        expected.load_weights(weights.items())
        plan.apply(pieces(weights, rows))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected.get_parameter(name)), name


def test_a_loader_that_computes_has_no_plan() -> None:
    """A copy of something computed would be the same value for ever."""
    weights = checkpoint()
    weights["computed"] = weights.pop("scale")
    with pytest.raises(PlanError, match=r"computes what it copies: \[1\] to \[1\]"):
        planned(weights, Stacked())


def test_a_loader_that_reads_values_has_no_plan() -> None:
    class Reads(Stacked):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for _, weight in weights:
                self.scale.data.fill_(float(weight.sum()))

    with pytest.raises(PlanError, match="reads values"):
        planned(checkpoint(), Reads())


def test_a_parameter_left_out_is_noticed() -> None:
    """Half of the stack is not written: the rest would silently stay old."""
    weights = checkpoint()
    del weights["v"]
    with pytest.raises(PlanError, match="writes 16 of the 24 elements of qv"):
        planned(weights, Stacked())


def test_a_place_written_twice_is_noticed() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(4), requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for _, weight in weights:
                self.a.data[:2].copy_(weight)

    with pytest.raises(PlanError, match="writes one place twice"):
        record_plan(Twice(), {name: TensorHeader("F32", (2,)) for name in "xy"})
