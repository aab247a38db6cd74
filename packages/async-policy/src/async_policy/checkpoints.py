"""Checkpoints that are either whole or not there.

::

    .writing-00000012-3f9a   fill() writes here; every file and folder is fsynced
            │  one rename
            ▼
    step-00000012            current, because it has the highest step
            │  one rename, once more than `keep` are there
            ▼
    .deleting-00000010-77c2  on its way out

A name without a leading dot is therefore always a whole checkpoint, whatever was killed when.
Names with a dot are leftovers of killed processes; the next write removes them.
"""

import fcntl
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from async_policy.errors import CheckpointError
from async_policy.json_files import fsync_path

STEP_NAME = re.compile(r"step-(\d{8,})")
LOCK_NAME = ".lock"
LEFTOVER_PREFIXES = (".writing-", ".deleting-")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One whole checkpoint."""

    step: int
    """Optimizer steps behind it."""

    path: Path
    """Its folder."""


@final
class CheckpointStore:
    """A folder of checkpoints, of which the one with the highest step is current.

    One process writes at a time, on one machine or on a file system with working locks; the
    store finds out if another one does.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        """Name the folder; creates nothing.

        Args:
            folder: where the checkpoints are. Temporary and final names are in this folder, so
                that a rename is enough.
            keep: checkpoints to leave after a write, the new one included.

        Raises:
            ValueError: if `keep` is below 1.
        """
        if keep < 1:
            message = f"CheckpointStore: expected keep of at least 1, got {keep}"
            raise ValueError(message)
        self.folder = folder
        self.keep = keep

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Every whole checkpoint, the oldest first."""
        if not self.folder.is_dir():
            return ()
        found = [
            Checkpoint(step=int(match[1]), path=path)
            for path in self.folder.iterdir()
            if (match := STEP_NAME.fullmatch(path.name)) and path.is_dir()
        ]
        return tuple(sorted(found, key=lambda checkpoint: checkpoint.step))

    def latest(self) -> Checkpoint | None:
        """The current checkpoint, or None if there is none."""
        return next(reversed(self.checkpoints()), None)

    def write(self, step: int, fill: Callable[[Path], None]) -> Checkpoint:
        """Have `fill` write a new checkpoint into the folder it is given, and make it current.

        The new one becomes current in one rename, after all that `fill` wrote is on the disk;
        only then are older ones removed. If `fill` raises, or the process is killed at any
        moment, the checkpoint before stays current.

        Raises:
            ValueError: if `step` is not above that of the current checkpoint.
            CheckpointError: if another process is writing into this folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._sole_writer():
            for path in self.folder.iterdir():
                if path.name.startswith(LEFTOVER_PREFIXES):
                    shutil.rmtree(path)
            current = self.latest()
            if step < 0 or (current is not None and step <= current.step):
                lowest = 0 if current is None else current.step + 1
                message = (
                    f"CheckpointStore.write: expected a step of at least {lowest}, got {step}; "
                    f"it would not become current in {self.folder}"
                )
                raise ValueError(message)
            temporary = self.folder / f".writing-{step:08d}-{secrets.token_hex(4)}"
            final_path = self.folder / f"step-{step:08d}"
            temporary.mkdir()
            try:
                fill(temporary)
                for path in temporary.rglob("*"):
                    if not path.is_symlink():
                        fsync_path(path)
                fsync_path(temporary)
                temporary.rename(final_path)
            except BaseException:
                if temporary.exists():
                    shutil.rmtree(temporary)
                raise
            fsync_path(self.folder)
            self._prune()
        return Checkpoint(step=step, path=final_path)

    def _prune(self) -> None:
        for checkpoint in self.checkpoints()[: -self.keep]:
            # Renamed first: a kill in the middle of the removal leaves no half under a good name.
            doomed = self.folder / f".deleting-{checkpoint.step:08d}-{secrets.token_hex(4)}"
            checkpoint.path.rename(doomed)
            shutil.rmtree(doomed)

    @contextmanager
    def _sole_writer(self) -> Iterator[None]:
        """Hold the folder's lock; the kernel lets go of it when the process dies."""
        with (self.folder / LOCK_NAME).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                message = (
                    f"another process is writing a checkpoint into {self.folder}; two runs must "
                    f"not share a folder"
                )
                raise CheckpointError(message) from error
            yield
