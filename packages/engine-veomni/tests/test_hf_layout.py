"""Names and layouts of experts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine_veomni.hf_layout import check_folder, split_stack

PREFIX = "model.layers.0.mlp.experts"


def test_gate_and_up_come_apart_untransposed() -> None:
    """With E=2, I=3, H=3 the gate is all 1, the up projection all 2 (A42)."""
    stack = torch.cat([torch.ones(2, 3, 3), torch.full((2, 3, 3), 2.0)], dim=1)
    weights = dict(split_stack(f"{PREFIX}.gate_up_proj", stack))
    assert list(weights) == [
        f"{PREFIX}.0.gate_proj.weight",
        f"{PREFIX}.0.up_proj.weight",
        f"{PREFIX}.1.gate_proj.weight",
        f"{PREFIX}.1.up_proj.weight",
    ]
    for name, weight in weights.items():
        assert torch.equal(weight, torch.full((3, 3), 1.0 if "gate" in name else 2.0))


def test_down_is_not_transposed() -> None:
    """A square down projection keeps its rows, under the number of its expert (A42)."""
    stack = torch.arange(18.0).view(2, 3, 3)
    weights = dict(split_stack(f"{PREFIX}.down_proj", stack, first_expert=4))
    assert list(weights) == [f"{PREFIX}.4.down_proj.weight", f"{PREFIX}.5.down_proj.weight"]
    assert torch.equal(weights[f"{PREFIX}.5.down_proj.weight"][0], torch.tensor([9.0, 10.0, 11.0]))


def test_parts_of_a_stack_are_copies() -> None:
    """Writing to the stack later changes no tensor that was handed out."""
    stack = torch.zeros(1, 2, 2)
    ((_, weight),) = split_stack(f"{PREFIX}.down_proj", stack)
    stack.fill_(7.0)
    assert torch.equal(weight, torch.zeros(2, 2))


def test_missing_and_unknown_weights_are_refused(tmp_path: Path) -> None:
    """VeOmni would draw the missing ones at random and drop the rest (A42, VeOmni#67)."""
    save_file({"model.other.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"missing model\.norm\.weight, unknown model\.other\.weight$"
    ):
        check_folder(tmp_path, {"model.norm.weight": (2,)})


def test_experts_in_one_tensor_are_refused_with_the_way_out(tmp_path: Path) -> None:
    """A folder with stacked experts says what to do with it."""
    save_file({f"{PREFIX}.gate_up_proj": torch.zeros(2, 6, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"in one tensor: load it with transformers and save it"):
        check_folder(tmp_path, {f"{PREFIX}.0.gate_proj.weight": (3, 3)})


def test_another_shape_is_refused(tmp_path: Path) -> None:
    """The message holds both shapes."""
    save_file({"model.norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"shape \(2,\) by config.json, got \(3,\)"):
        check_folder(tmp_path, {"model.norm.weight": (2,)})


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    """Pickled weights are not read."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no \*\.safetensors file"):
        check_folder(tmp_path, {"model.norm.weight": (2,)})
