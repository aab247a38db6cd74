"""Names and layouts of experts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine_veomni.folder_stacks import in_folder
from engine_veomni.hf_layout import check_folder

PREFIX = "model.layers.0.mlp.experts"


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


@pytest.mark.parametrize("num_experts", [1, 3, 8, 19])
def test_stacks_are_swapped_in_their_own_memory(num_experts: int) -> None:
    """Every expert transposed, with no second stack beside the first."""
    stack = torch.arange(num_experts * 6.0).view(num_experts, 2, 3)
    wanted = stack.transpose(1, 2).clone()
    [(name, found)] = in_folder(f"{PREFIX}.down_proj", stack, stacked=True)
    assert name == f"{PREFIX}.down_proj"
    assert found.is_contiguous()
    assert found.data_ptr() == stack.data_ptr()
    assert torch.equal(found, wanted)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    """The message holds both shapes."""
    save_file({"model.norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"shape \(2,\) by config.json, got \(3,\)"):
        check_folder(tmp_path, {"model.norm.weight": (2,)})


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    """Pickled weights are not read."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"weights in \*\.safetensors, found none"):
        check_folder(tmp_path, {"model.norm.weight": (2,)})
