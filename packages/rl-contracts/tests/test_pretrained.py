"""Hugging Face folders."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rl_contracts import pretrained
from rl_contracts.pretrained import folder_shapes, write_pretrained
from rl_contracts.train import NamedTensor


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but missing from the stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What training started from: a config, a tokenizer, and weights in several forms."""
    folder = tmp_path / "source"
    (folder / "original").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3_moe", "torch_dtype": "float16"}')
    for name in ("tokenizer.json", "chat_template.jinja", "vocab.bpe"):
        (folder / name).write_text(f"{{{name}}}")
    for name in ("model.safetensors.index.json", "pytorch_model.bin", "model.gguf"):
        (folder / name).write_text("stale")
    return folder


def _weights() -> list[NamedTensor]:
    return [NamedTensor(name, torch.tensor([float(len(name)), 1.0])) for name in ("a", "bb", "c")]


def test_weights_are_spread_over_files_with_an_index(tmp_path: Path, source: Path) -> None:
    """Three tensors of 8 bytes in files of at most 16: two files, all weights in the index."""
    folder = tmp_path / "new"
    write_pretrained(folder, _weights(), source=source, dtype_name="float32", max_file_bytes=16)
    assert sorted(file.name for file in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "vocab.bpe",
    ]
    assert (folder / "tokenizer.json").read_text() == "{tokenizer.json}"
    assert json.loads((folder / "config.json").read_text()) == {
        "model_type": "qwen3_moe",
        "dtype": "float32",
    }
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {
        "metadata": {"total_size": 24},
        "weight_map": {"a": first, "bb": first, "c": second},
    }
    assert load_file(folder / first)["bb"].tolist() == [2.0, 1.0]
    assert folder_shapes(folder) == {"a": (2,), "bb": (2,), "c": (2,)}


def test_weights_that_fit_are_one_file_without_index(tmp_path: Path, source: Path) -> None:
    """As transformers writes a small model."""
    folder = tmp_path / "new"
    write_pretrained(folder, _weights(), source=source, dtype_name="float32")
    assert load_file(folder / "model.safetensors").keys() == {"a", "bb", "c"}
    assert not (folder / "model.safetensors.index.json").exists()


def test_a_failure_leaves_no_folder_and_no_rank_waiting(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full disk the weights are still gathered to the end, as on the other ranks (A49)."""
    taken: list[str] = []

    def gathered() -> Iterator[NamedTensor]:
        for weight in _weights():
            taken.append(weight.name)
            yield weight

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pretrained, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_pretrained(
            tmp_path / "new", gathered(), source=source, dtype_name="float32", max_file_bytes=8
        )
    assert taken == ["a", "bb", "c"]
    assert not (tmp_path / "new").exists()


def test_an_existing_folder_is_not_overwritten(source: Path) -> None:
    """The message names it."""
    with pytest.raises(FileExistsError, match=r"source: expected a new folder, but it exists"):
        write_pretrained(source, _weights(), source=source, dtype_name="float32")


def test_shapes_are_read_of_all_files(tmp_path: Path) -> None:
    """One dictionary over several files, whatever their type; pickled weights are not read."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"expected weights in \*\.safetensors, found none"):
        folder_shapes(tmp_path)
    save_file({"x": torch.zeros(2, 3)}, tmp_path / "1.safetensors")
    save_file({"y": torch.zeros((), dtype=torch.bfloat16)}, tmp_path / "2.safetensors")
    assert folder_shapes(tmp_path) == {"x": (2, 3), "y": ()}
