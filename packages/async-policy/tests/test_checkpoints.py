"""Checkpoints: whole or not there, whatever is killed when."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from async_policy import CheckpointError, CheckpointStore, KeepBest
from async_policy.checkpoints import METRIC_NAME

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

KILLED_WITH_BEST = """
import os, signal, sys
from pathlib import Path
from async_policy import CheckpointStore, KeepBest, checkpoints

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def fill(folder):
    (folder / "weights").touch()
    if "MOMENT" == "fill":
        die()

best = KeepBest(metric="reward/heldout/mean", better="higher")
store = CheckpointStore(Path(sys.argv[1]), keep=1, keep_best=best)
if "MOMENT" == "rename":
    CheckpointStore._prune = die
if "MOMENT" == "removal":
    checkpoints.shutil.rmtree = die
store.write(3, fill, value=0.2)
"""

FULL = """
import os
from pathlib import Path
from async_policy import CheckpointError, CheckpointStore

store = CheckpointStore(Path(os.environ["STORE"]), keep=2)

def fill(size):
    return lambda folder: [(folder / "weights").write_bytes(bytes(size)), None][1]

store.write(1, fill(100_000))
try:
    store.write(2, fill(200_000))
except CheckpointError as error:
    print(error)
latest = store.latest()
size = (latest.path / "weights").stat().st_size
print(latest.step, sorted(path.name for path in store.folder.iterdir()), size)
print(store.write(3, fill(50_000)).step)
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


def scored(
    folder: Path, *, keep: int = 1, better: Literal["higher", "lower"] = "higher"
) -> CheckpointStore:
    """A store that keeps the best reward, or the lowest."""
    return CheckpointStore(
        folder, keep=keep, keep_best=KeepBest(metric="reward/heldout/mean", better=better)
    )


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.checkpoints()]


def test_best_checkpoint_is_kept_beside_the_latest(tmp_path: Path) -> None:
    """Rewards .1 .5 .3 .5 .6 with keep=1: step 2 stays until 5 is better; 4 only equals it."""
    store = scored(tmp_path)
    assert store.best() is None
    kept = []
    for step, value in enumerate((0.1, 0.5, 0.3, 0.5, 0.6), start=1):
        written = store.write(step, lambda folder: (folder / "weights").touch(), value=value)
        assert written == store.latest()
        best = store.best()
        assert best is not None
        kept.append((steps(store), best.step, best.value))
    assert kept == [
        ([1], 1, 0.1),
        ([2], 2, 0.5),
        ([2, 3], 2, 0.5),
        ([2, 4], 2, 0.5),
        ([5], 5, 0.6),
    ]


def test_lower_may_be_better_and_a_step_may_be_unmeasured(tmp_path: Path) -> None:
    """Losses 2, none, 1, none, none with keep=2: step 3 is the best; unmeasured ones rotate."""
    store = scored(tmp_path, keep=2, better="lower")
    for step, value in enumerate((2.0, None, 1.0, None, None), start=1):
        store.write(step, lambda _: None, value=value)
    best = store.best()
    assert best is not None
    assert (best.step, steps(store)) == (3, [3, 4, 5])
    # a store of another metric, or of none, knows nothing of these values
    other = KeepBest(metric="loss/policy/mean", better="lower")
    assert CheckpointStore(tmp_path, keep_best=other).best() is None
    with pytest.raises(ValueError, match="keeps no best one; give keep_best"):
        CheckpointStore(tmp_path).best()


def test_value_without_effect_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """A value for a store that keeps no best one, and a value that is not a number."""
    with pytest.raises(ValueError, match=r"value = 0\.5 of step 1 has no effect"):
        CheckpointStore(tmp_path).write(1, lambda _: None, value=0.5)
    with pytest.raises(ValueError, match=r"a finite reward/heldout/mean for step 1, got nan"):
        scored(tmp_path).write(1, lambda _: None, value=math.nan)
    assert list(tmp_path.iterdir()) == []
    scored(tmp_path).write(1, lambda _: None, value=1.0)
    (tmp_path / number(1) / METRIC_NAME).write_text('{"metric": "reward/heldout/mean"}')
    with pytest.raises(CheckpointError, match=r"expected a number as value in .*, got None"):
        scored(tmp_path).latest()


def test_a_value_of_another_kind_of_number_can_be_read_again(tmp_path: Path) -> None:
    """A share of 1 of 1 may come as True; a store that cannot read it could not resume."""
    store = CheckpointStore(tmp_path, keep_best=KeepBest(metric="m", better="higher"))
    for step, value in enumerate((True, 2), start=1):
        store.write(step, lambda _: None, value=value)
    assert [checkpoint.value for checkpoint in store.checkpoints()] == [1.0, 2.0]


@pytest.mark.parametrize("moment", ["fill", "rename", "removal"])
def test_kill_at_any_moment_leaves_the_best_and_the_latest(tmp_path: Path, moment: str) -> None:
    """SIGKILL while step 3 is written, just made current, or while step 2 is removed."""
    store = scored(tmp_path)
    for step, value in ((1, 0.9), (2, 0.1)):
        store.write(step, lambda folder: (folder / "weights").touch(), value=value)
    run_killed(KILLED_WITH_BEST.replace("MOMENT", moment), tmp_path)
    best, latest = store.best(), store.latest()
    assert best is not None
    assert latest is not None
    assert (best.step, latest.step) == (1, {"fill": 2, "rename": 3, "removal": 3}[moment])
    assert (best.path / "weights").exists()
    assert (latest.path / "weights").exists()
    store.write(4, lambda folder: (folder / "weights").touch(), value=0.2)
    assert steps(store) == [1, 4]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", number(1), number(4)]


def test_full_disk_is_an_error_with_a_name_and_leaves_the_last_state(tmp_path: Path) -> None:
    """A real file system of 256 KiB: step 2 does not fit beside step 1, which stays current."""
    script = f"mount -t tmpfs -o size=256k tmpfs {tmp_path} && exec {sys.executable} -c '{FULL}'"
    finished = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "STORE": str(tmp_path)},
    )
    if "unshare" in finished.stderr or "mount:" in finished.stderr:
        pytest.skip(f"this machine lets nobody mount a file system: {finished.stderr}")
    assert finished.stdout == (
        f"no room to write the checkpoint of step 2 into {tmp_path}: No space left on device; "
        "step 1 stays current; free disk space, or keep fewer checkpoints (keep is 2)\n"
        f"1 ['.lock', '{number(1)}'] 100000\n"
        "3\n"
    )


def test_file_larger_than_allowed_is_an_error_with_a_name(tmp_path: Path) -> None:
    """The same where the limit is one on a file's size (ulimit -f), which needs no mount."""
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))\n"
    finished = subprocess.run(
        [sys.executable, "-c", script + FULL],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "STORE": str(tmp_path)},
    )
    assert finished.stdout.startswith(
        f"no room to write the checkpoint of step 2 into {tmp_path}: File too large; step 1 stays"
    )
    assert finished.stdout.endswith(f"1 ['.lock', '{number(1)}'] 100000\n3\n")
