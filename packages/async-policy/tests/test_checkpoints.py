"""Checkpoints: whole or not there, whatever is killed when."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from async_policy import CheckpointError, CheckpointStore

KILLED_IN_FILL = """
import os, signal, sys
from pathlib import Path
from async_policy import CheckpointStore

def fill(folder):
    (folder / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

CheckpointStore(Path(sys.argv[1]), keep=1).write(2, fill)
"""

KILLED_IN_REMOVAL = """
import os, shutil, signal, sys
from pathlib import Path
from async_policy import CheckpointStore

def die_half_way(path):
    (path / "weights").unlink()
    os.kill(os.getpid(), signal.SIGKILL)

shutil.rmtree = die_half_way
CheckpointStore(Path(sys.argv[1]), keep=1).write(2, lambda folder: None)
"""

WRITES_UNTIL_TOLD = """
import sys
from pathlib import Path
from async_policy import CheckpointStore

def fill(folder):
    print("writing", flush=True)
    sys.stdin.readline()

CheckpointStore(Path(sys.argv[1])).write(1, fill)
"""


def number(step: int) -> str:
    """Eight digits, as in a folder's name."""
    return f"step-{step:08d}"


def write(store: CheckpointStore, step: int) -> None:
    def fill(folder: Path) -> None:
        (folder / "shards").mkdir()
        (folder / "shards" / "weights").write_text(str(step))

    store.write(step, fill)


def run_killed(script: str, folder: Path) -> None:
    finished = subprocess.run([sys.executable, "-c", script, str(folder)], check=False, timeout=60)
    assert finished.returncode == -signal.SIGKILL


def test_highest_step_is_current_and_old_ones_go(tmp_path: Path) -> None:
    """Of steps 1, 5 and 10 the store keeps 5 and 10, and 10 is current."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=2)
    assert store.latest() is None
    for step in (1, 5, 10):
        write(store, step)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [5, 10]
    latest = store.latest()
    assert latest is not None
    assert latest.path == store.folder / number(10)
    assert (latest.path / "shards" / "weights").read_text() == "10"


def test_failed_save_leaves_the_only_checkpoint(tmp_path: Path) -> None:
    """A49: keep=1 and a save that fails half-way: the old one is there and chosen on resume."""
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)

    def fill(folder: Path) -> None:
        (folder / "weights").write_text("half")
        message = "No space left on device"
        raise OSError(message)

    with pytest.raises(OSError, match="No space left"):
        store.write(2, fill)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", number(1)]


def test_kill_in_the_middle_of_a_save_leaves_the_previous_one(tmp_path: Path) -> None:
    """SIGKILL inside fill: the previous one is current, the next write clears the remains."""
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    run_killed(KILLED_IN_FILL, tmp_path)
    remains = [path for path in tmp_path.iterdir() if path.name.startswith(".writing-")]
    assert [(path / "weights").read_text() for path in remains] == ["half"]
    latest = store.latest()
    assert latest is not None
    assert (latest.step, (latest.path / "shards" / "weights").read_text()) == (1, "1")
    write(store, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", number(2)]


def test_kill_in_the_middle_of_a_removal_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    """SIGKILL while an old one is removed: only whole ones have a checkpoint's name."""
    store = CheckpointStore(tmp_path, keep=1)
    store.write(1, lambda folder: (folder / "weights").touch())
    run_killed(KILLED_IN_REMOVAL, tmp_path)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [2]
    write(store, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", number(3)]


def test_new_one_is_current_before_an_old_one_goes(tmp_path: Path) -> None:
    """While fill runs, with keep=1, the old checkpoint is there and current."""
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    seen: list[int] = []

    def fill(folder: Path) -> None:
        assert folder.name.startswith(".writing-00000002-")
        seen.extend(checkpoint.step for checkpoint in store.checkpoints())

    store.write(2, fill)
    assert seen == [1]
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [2]


def test_step_that_would_not_become_current_is_refused(tmp_path: Path) -> None:
    """A step at or below the current one would be written and never read."""
    store = CheckpointStore(tmp_path)
    write(store, 7)
    for step in (7, 3):
        with pytest.raises(ValueError, match=f"a step of at least 8, got {step}; it would"):
            write(store, step)
    with pytest.raises(ValueError, match="expected keep of at least 1, got 0"):
        CheckpointStore(tmp_path, keep=0)


def test_two_writers_in_one_folder_are_found(tmp_path: Path) -> None:
    """A second run on the same folder is refused while the first writes, and not afterwards."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITES_UNTIL_TOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "writing\n"
        store = CheckpointStore(tmp_path)
        with pytest.raises(CheckpointError, match="another process is writing a checkpoint into"):
            write(store, 2)
        other.communicate("go on\n", timeout=60)
    write(store, 2)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, 2]


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    """Files and foreign folders in the store are left alone and never chosen."""
    (tmp_path / "step-00000009").touch()
    (tmp_path / "step-best").mkdir()
    store = CheckpointStore(tmp_path)
    assert store.latest() is None
    write(store, 1)
    assert (tmp_path / "step-best").is_dir()
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1]
