"""Folders that appear at once or not at all."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from engine_veomni import init_process_group
from engine_veomni.checkpoint import new_folder
from engine_veomni.pretrained import save_pretrained
from rl_contracts.train import NamedTensor


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    init_process_group()
    yield
    dist.destroy_process_group()


def test_a_failed_write_leaves_no_folder(tmp_path: Path) -> None:
    """What is there under the final name is complete, also after a failure and a new try (A49)."""
    folder = tmp_path / "checkpoint"

    def fail_half_way() -> None:
        with new_folder(folder) as partial:
            (partial / "half").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert not folder.exists()
    with new_folder(folder) as partial:
        (partial / "whole").write_text("whole")
        assert not folder.exists()
    assert [file.name for file in folder.iterdir()] == ["whole"]


def test_a_folder_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    """Not even an empty one."""
    with pytest.raises(FileExistsError, match="exists; give a new folder"), new_folder(tmp_path):
        pass


def test_weights_are_spread_over_files_with_an_index(tmp_path: Path) -> None:
    """Three tensors of 8 bytes in files of at most 16: two files, all weights in the index."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "qwen3_moe", "torch_dtype": "float16"}')
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors.index.json").write_text("{}")
    weights = [
        NamedTensor(name, torch.tensor([float(len(name)), 1.0])) for name in ("a", "bb", "c")
    ]
    folder = tmp_path / "new"
    save_pretrained(folder, weights, source=source, dtype_name="float32", max_file_bytes=16)
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert '"dtype": "float32"' in (folder / "config.json").read_text()
    assert "torch_dtype" not in (folder / "config.json").read_text()
    index = (folder / "model.safetensors.index.json").read_text()
    assert '"total_size": 24' in index
    assert '"c": "model-00002-of-00002.safetensors"' in index
    first = load_file(folder / "model-00001-of-00002.safetensors")
    assert first["bb"].tolist() == [2.0, 1.0]
