"""Checkpoints: whole or not there, and of this model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig

SaveModel = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("process_group")


def _engine(folder: Path) -> FsdpEngine:
    config = FsdpConfig(
        model_path=str(folder),
        optim=OptimConfig(learning_rate=0.01),
        compute_dtype="float32",
    )
    return FsdpEngine(config, device=torch.device("cpu"))


def test_the_folder_holds_safetensors_alone(save_model: SaveModel, tmp_path: Path) -> None:
    """Nothing in it can be unpickled, and no unfinished folder is left beside it."""
    _engine(save_model()).save_checkpoint(tmp_path / "step0")
    assert {file.suffix for file in (tmp_path / "step0").iterdir()} == {".safetensors"}
    assert not list(tmp_path.glob(".*"))


def test_a_save_that_fails_leaves_the_old_checkpoint(
    save_model: SaveModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-way failure: the name stays free, the earlier folder loads, and saving works again."""
    engine = _engine(save_model())
    engine.save_checkpoint(tmp_path / "good")
    with monkeypatch.context() as patch:
        patch.setattr(state_dict_saver, "save", _full_disk)
        with pytest.raises(OSError, match="No space left"):
            engine.save_checkpoint(tmp_path / "next")
    assert not (tmp_path / "next").exists()
    engine.load_checkpoint(tmp_path / "good")
    engine.save_checkpoint(tmp_path / "next")
    engine.load_checkpoint(tmp_path / "next")


def _full_disk(_: object, *, storage_writer: HuggingFaceStorageWriter) -> None:
    Path(storage_writer.path, "half.safetensors").write_text("half")
    raise OSError(28, "No space left on device")


def test_another_models_checkpoint_is_refused(save_model: SaveModel, tmp_path: Path) -> None:
    """Shapes that differ and tensors left over are named; nothing is loaded half."""
    _engine(save_model("qwen3")).save_checkpoint(tmp_path / "step0")
    smaller = _engine(save_model("llama", intermediate_size=16))
    before = dict(smaller.export_weights())
    with pytest.raises(ValueError, match=r"of another model: 18 tensors differ and .* left over"):
        smaller.load_checkpoint(tmp_path / "step0")
    after = dict(smaller.export_weights())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_missing_checkpoint_is_named(save_model: SaveModel, tmp_path: Path) -> None:
    """The message has the folder."""
    with pytest.raises(FileNotFoundError, match=r"nowhere: there is no checkpoint"):
        _engine(save_model()).load_checkpoint(tmp_path / "nowhere")
