"""Checkpoints: whole or not there, and of this model."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

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


def test_a_save_that_fails_leaves_the_old_checkpoint(save_model: SaveModel, tmp_path: Path) -> None:
    """A file that the system cuts short: the message names folder, rank and cause, the name stays
    free, the earlier folder loads, and saving works again (A49).
    """
    engine = _engine(save_model())
    engine.save_checkpoint(tmp_path / "good")
    with (
        _largest_file(4096),
        pytest.raises(OSError, match=r"next: cannot be written, .* save again: rank 0: "),
    ):
        engine.save_checkpoint(tmp_path / "next")
    assert not (tmp_path / "next").exists()
    engine.load_checkpoint(tmp_path / "good")
    engine.save_checkpoint(tmp_path / "next")
    engine.load_checkpoint(tmp_path / "next")


@contextmanager
def _largest_file(num_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_checkpoint_that_cannot_be_read_is_named(
    save_model: SaveModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the disk comes out as an OSError with the folder, on every rank."""
    engine = _engine(save_model())
    engine.save_checkpoint(tmp_path / "step0")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(HuggingFaceStorageReader, "read_data", fail)
    with pytest.raises(
        OSError,
        match=r"step0: cannot be read; build a new engine .*: rank 0: OSError: .*Input/output",
    ):
        engine.load_checkpoint(tmp_path / "step0")


def test_an_interrupt_stays_one(
    save_model: SaveModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while saving is no disk error, which a caller might save again after."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _engine(save_model()).save_checkpoint(tmp_path / "step0")
    assert not (tmp_path / "step0").exists()


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
