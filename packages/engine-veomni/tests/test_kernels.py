"""Kernels in the slots of VeOmni's models."""

import sys
from types import ModuleType

import pytest
import torch

from engine_veomni import OptimConfig, VeomniConfig
from engine_veomni.kernels import ModelKernels, kernel_names, rms_norm

CONFIG = VeomniConfig(model_path="model", optim=OptimConfig(learning_rate=1e-5))
CPU = torch.device("cpu")


def test_rms_norm_by_hand() -> None:
    """The root mean square of 3 and 4 is the root of 12.5."""
    normed = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(normed, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)


def test_engines_of_one_process_keep_their_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """VeOmni's slots are globals of a module: whoever binds last would compute for both."""
    from veomni.ops.dispatch import OpSlot  # noqa: PLC0415 - vendor

    module = ModuleType("generated_model")
    slot = OpSlot("moe_experts", "standard")
    vars(module).update(
        experts=slot,
        norm=OpSlot("rms_norm", "standard"),
        loss=OpSlot("cross_entropy_loss", "causal"),
        other_loss=OpSlot("cross_entropy_loss", "seq_cls"),
    )
    monkeypatch.setitem(sys.modules, "generated_model", module)
    kind = type("Model", (torch.nn.Module,), {"__module__": "generated_model"})
    grouped, eager = kernel_names(CONFIG, device=CPU, has_experts=True), {"moe_experts": "eager"}
    first = ModelKernels(kind(), grouped)
    kernel = slot.bound_kernel()
    second = ModelKernels(kind(), eager)
    assert slot.bound_kernel() is None
    first.bind()
    assert slot.bound_kernel() is kernel is not None
    assert (first.names["moe_experts"], second.names) == ("engine_veomni_grouped_mm", eager)


def test_a_model_without_the_slot_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that renamed it would run its own kernel without a word."""
    monkeypatch.setitem(sys.modules, "generated_model", ModuleType("generated_model"))
    kind = type("Model", (torch.nn.Module,), {"__module__": "generated_model"})
    with pytest.raises(
        RuntimeError, match="expected one slot for rms_norm in generated_model, got 0"
    ):
        ModelKernels(kind(), {"rms_norm": "eager"})
