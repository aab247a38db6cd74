"""Checkpoints: whole or not there, and of this model."""

import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig, saving
from engine_fsdp.checkpoint import Shard, write_file

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
    assert [file.name for file in (tmp_path / "step0").iterdir()] == ["rank-00000.safetensors"]
    assert not list(tmp_path.glob(".*"))


def test_what_is_written_in_the_background_is_the_state_at_the_call(
    save_model: SaveModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the writer is held up, the engine loads other weights: the folder appears with those of
    the call, in the bytes of a synchronous save, and not before all of it is written (A49).
    """
    engine = _engine(save_model())
    engine.save_checkpoint(tmp_path / "before")
    go_on = threading.Event()

    def held_up(shards: Mapping[str, Shard], folder: Path) -> None:
        assert go_on.wait(60.0)
        write_file(shards, folder)

    monkeypatch.setattr(saving, "write_file", held_up)
    pending = engine.begin_checkpoint(tmp_path / "next")
    for parameter in engine._parameters.values():
        parameter.detach().zero_()
    assert not pending.done
    assert not (tmp_path / "next").exists()
    go_on.set()
    pending.wait()
    assert pending.done
    before, after = (
        load_file(tmp_path / name / "rank-00000.safetensors") for name in ("before", "next")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_error_in_the_background_comes_out_at_wait_and_at_the_next_call(
    save_model: SaveModel, tmp_path: Path
) -> None:
    """Nobody is left believing in a checkpoint that is not there; one that waits hears of it, and
    so does one that only saves again. Then saving works.
    """
    engine = _engine(save_model())
    text = r"next: cannot be written, .* save again: rank 0: OSError: .*File too large"
    with _largest_file(4096):
        pending = engine.begin_checkpoint(tmp_path / "next")
        with pytest.raises(OSError, match=text):
            pending.wait()
    assert not list(tmp_path.glob("*next*"))
    with pytest.raises(OSError, match=text):
        engine.save_checkpoint(tmp_path / "later")
    engine.save_checkpoint(tmp_path / "later")
    engine.load_checkpoint(tmp_path / "later")


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

    monkeypatch.setattr(saving, "write_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _engine(save_model()).save_checkpoint(tmp_path / "step0")
    assert not list(tmp_path.glob("*step0*"))


@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_a_checkpoint_that_is_not_whole_is_refused(
    save_model: SaveModel, tmp_path: Path, damage: str
) -> None:
    """A file that did not come along, or not to its end, is named, and no weight changes."""
    engine = _engine(save_model())
    before = dict(engine.export_weights())
    engine.save_checkpoint(tmp_path / "step0")
    file = tmp_path / "step0" / "rank-00000.safetensors"
    kind: type[Exception]
    if damage == "missing":
        file.rename(file.with_name("rank-00001.safetensors"))
        kind, text = ValueError, r"step0: the checkpoint is not whole: expected"
    else:
        file.write_bytes(file.read_bytes()[:-1])
        kind, text = OSError, r"step0: cannot be read; build a new engine"
    with pytest.raises(kind, match=text):
        engine.load_checkpoint(tmp_path / "step0")
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.export_weights())


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
