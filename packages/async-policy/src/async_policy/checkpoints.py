"""Checkpoints that are either whole or not there.

::

    .writing-00000012-3f9a   fill() writes here; every file and folder is fsynced
            │  one rename
            ▼
    step-00000012            current, because it has the highest step
            │  one rename, once `keep` later ones are there, unless it is the best
            ▼
    .deleting-00000010-77c2  on its way out

A name without a leading dot is therefore always a whole checkpoint, whatever was killed when.
Names with a dot are leftovers of killed processes; the next write removes them.

What a checkpoint's metric is stands in a file inside it, so it is there or not with the checkpoint,
and the best one is found by looking: there is no pointer that could name a checkpoint that is gone.
"""

import errno
import fcntl
import math
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import attrs

from async_policy.errors import CheckpointError
from async_policy.json_files import JsonValue, fsync_path, read_json, write_json

STEP_NAME = re.compile(r"step-(\d{8,})")
LOCK_NAME = ".lock"
LEFTOVER_PREFIXES = (".writing-", ".deleting-")
METRIC_NAME = ".metric.json"
"""File inside a checkpoint that holds the metric given with it."""


OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk is full, the user's share of it is, or a file is larger than may be written."""


@attrs.frozen(kw_only=True)
class KeepBest:
    """Keep the checkpoint with the best value of a metric, however old it is."""

    metric: str = attrs.field(validator=attrs.validators.min_len(1))
    """Name of the metric, as in ``reward/heldout/mean``."""

    better: Literal["higher", "lower"] = attrs.field(
        validator=attrs.validators.in_(("higher", "lower"))
    )
    """Which values are better. Of equal ones the first is the best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One whole checkpoint."""

    step: int
    """Optimizer steps behind it."""

    path: Path
    """Its folder."""

    value: float | None = None
    """Value of the store's metric (`KeepBest`), if one was given with it."""


@final
class CheckpointStore:
    """A folder of checkpoints: the one with the highest step is current, and one may be the best.

    One process writes at a time, on one machine or on a file system with working locks; the
    store finds out if another one does.
    """

    def __init__(self, folder: Path, *, keep: int = 2, keep_best: KeepBest | None = None) -> None:
        """Name the folder; creates nothing.

        Args:
            folder: where the checkpoints are. Temporary and final names are in this folder, so
                that a rename is enough.
            keep: latest checkpoints to leave after a write, the new one included.
            keep_best: the best one is left beside those, until a better one is whole.

        Raises:
            ValueError: if `keep` is below 1.
        """
        if keep < 1:
            message = f"CheckpointStore: expected keep of at least 1, got {keep}"
            raise ValueError(message)
        self.folder = folder
        self.keep = keep
        self.keep_best = keep_best

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Every whole checkpoint, the oldest first.

        Raises:
            CheckpointError: if a checkpoint's metric is unreadable.
        """
        if not self.folder.is_dir():
            return ()
        found = [
            Checkpoint(step=int(match[1]), path=path, value=self._value_of(path))
            for path in self.folder.iterdir()
            if (match := STEP_NAME.fullmatch(path.name)) and path.is_dir()
        ]
        return tuple(sorted(found, key=lambda checkpoint: checkpoint.step))

    def latest(self) -> Checkpoint | None:
        """The current checkpoint, or None if there is none."""
        return next(reversed(self.checkpoints()), None)

    def best(self) -> Checkpoint | None:
        """The checkpoint with the best value of the metric, or None if none has a value.

        Raises:
            ValueError: if the store was made without `keep_best`.
        """
        if self.keep_best is None:
            message = f"CheckpointStore.best: {self.folder} keeps no best one; give keep_best"
            raise ValueError(message)
        sign = 1.0 if self.keep_best.better == "higher" else -1.0
        known = [(sign * c.value, c) for c in self.checkpoints() if c.value is not None]
        return max(known, key=lambda pair: pair[0])[1] if known else None

    def write(
        self, step: int, fill: Callable[[Path], None], *, value: float | None = None
    ) -> Checkpoint:
        """Have `fill` write a new checkpoint into the folder it is given, and make it current.

        The new one becomes current in one rename, after all that `fill` wrote is on the disk;
        only then are older ones removed, the best one excepted. If `fill` raises, or the process is
        killed at any moment, the checkpoint before stays current, and the best one before it the
        best.

        Args:
            step: optimizer steps behind it.
            fill: writes its files.
            value: of the metric of `keep_best`; None if it was not measured for this step.

        Raises:
            ValueError: if `step` is not above that of the current checkpoint, or `value` is not a
                number, or there is nothing that it would be compared for.
            CheckpointError: if another process is writing into this folder, or the disk is full.
        """
        self._check_value(step, value)
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
                if self.keep_best is not None and value is not None:
                    given: JsonValue = {"metric": self.keep_best.metric, "value": float(value)}
                    write_json(temporary / METRIC_NAME, given)
                for path in temporary.rglob("*"):
                    if not path.is_symlink():
                        fsync_path(path)
                fsync_path(temporary)
                temporary.rename(final_path)
            except BaseException as error:
                if temporary.exists():
                    shutil.rmtree(temporary)
                if isinstance(error, OSError) and error.errno in OUT_OF_SPACE:
                    raise CheckpointError(self._no_space(step, error)) from error
                raise
            fsync_path(self.folder)
            self._prune()
        return Checkpoint(step=step, path=final_path, value=value)

    def _check_value(self, step: int, value: float | None) -> None:
        if value is None:
            return
        if self.keep_best is None:
            message = (
                f"CheckpointStore.write: value = {value} of step {step} has no effect, since the "
                "store keeps no best checkpoint; give keep_best, or no value"
            )
            raise ValueError(message)
        if not math.isfinite(value):
            message = (
                f"CheckpointStore.write: expected a finite {self.keep_best.metric} for step "
                f"{step}, got {value}; leave value out where it could not be measured"
            )
            raise ValueError(message)

    def _no_space(self, step: int, error: OSError) -> str:
        current = self.latest()
        left = "there is none yet" if current is None else f"step {current.step} stays current"
        return (
            f"no room to write the checkpoint of step {step} into {self.folder}: {error.strerror}; "
            f"{left}; free disk space, or keep fewer checkpoints (keep is {self.keep})"
        )

    def _value_of(self, path: Path) -> float | None:
        """The value that was given with a checkpoint, if it is one of this store's metric."""
        if self.keep_best is None:
            return None
        try:
            given = read_json(path / METRIC_NAME)
        except FileNotFoundError:
            return None
        if not isinstance(given, Mapping) or given.get("metric") != self.keep_best.metric:
            return None
        value = given.get("value")
        if not isinstance(value, int | float) or isinstance(value, bool):
            message = f"expected a number as value in {path / METRIC_NAME}, got {value!r}"
            raise CheckpointError(message)
        return float(value)

    def _prune(self) -> None:
        best = None if self.keep_best is None else self.best()
        for checkpoint in self.checkpoints()[: -self.keep]:
            if checkpoint == best:
                continue
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
