"""The grouped products that stand in for VeOmni's Triton kernels."""

import sys
from types import ModuleType

import pytest
import torch

from engine_veomni import cpu_backend

ROWS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 3.0]])
ENDS = torch.tensor([2, 2, 3])
"""Two rows for the first group, none for the second, one for the third."""


def test_each_group_meets_its_own_matrix() -> None:
    """Rows times the transposed matrix of their group, by hand."""
    weights = torch.stack([torch.full((1, 2), value) for value in (1.0, 10.0, 100.0)])
    output = cpu_backend.group_gemm_same_nk(ROWS, weights, ENDS, 3, transpose_b=True)
    assert torch.equal(output, torch.tensor([[1.0], [1.0], [500.0]]))
    back = cpu_backend.group_gemm_same_nk(output, weights, ENDS, 3)
    assert torch.equal(back, torch.tensor([[1.0, 1.0], [1.0, 1.0], [50000.0, 50000.0]]))


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    """VeOmni hands over uninitialised memory for the gradient."""
    gradient = torch.full((3, 1, 2), torch.nan)
    outputs = torch.tensor([[1.0], [2.0], [3.0]])
    cpu_backend.group_gemm_same_mn(outputs, ROWS, gradient, ENDS, 3, transpose_a=True)
    assert torch.equal(gradient, torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]], [[6.0, 9.0]]]))


def test_kernels_that_were_there_before_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once VeOmni has bound its own kernels, a replacement would change nothing."""
    monkeypatch.setitem(
        sys.modules, cpu_backend.GROUPED_PRODUCTS, ModuleType(cpu_backend.GROUPED_PRODUCTS)
    )
    with pytest.raises(RuntimeError, match="was imported before the CPU backend was installed"):
        cpu_backend.install()
