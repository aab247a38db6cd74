"""``metrics.jsonl``: one JSON object per step, on the disk before `write` returns.

A record looks like this, on one line::

    {"step": 3, "unix_seconds": 1764515568.25, "reward/train/mean": 0.375}

A number that JSON cannot hold is written as the string ``"nan"``, ``"inf"`` or ``"-inf"`` and
read back as that number: the step in which a loss blew up is the one that a reader needs.

Only a line with its newline counts. What a kill leaves behind it is at most one line without,
which readers skip and `MetricsWriter.resume` cuts off.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Self, final

from rl_metrics.appending import AppendedFile
from rl_metrics.names import check_names

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What one step reported."""

    step: int
    """Number of the step; rises along a file."""

    unix_seconds: float
    """When the record was written, in seconds since 1970."""

    values: Mapping[str, float]
    """Metric name to value; units in `METRICS`."""


@final
class MetricsWriter:
    """Appends records to one file. A context manager; made by `create` or `resume`."""

    def __init__(
        self, path: Path, file: AppendedFile, *, last_step: int | None, num_dropped: int
    ) -> None:
        self._path = path
        self._file = file
        self._last_step = last_step
        self._num_dropped = num_dropped

    @classmethod
    def create(cls, path: Path) -> Self:
        """Start a new file.

        Raises:
            FileExistsError: if there is one: an earlier run's numbers are never overwritten.
        """
        try:
            file = AppendedFile.create(path)
        except FileExistsError as error:
            message = (
                f"{path} exists and holds an earlier run's metrics; continue it with "
                "MetricsWriter.resume, or choose another run folder"
            )
            raise FileExistsError(message) from error
        return cls(path, file, last_step=None, num_dropped=0)

    @classmethod
    def resume(cls, path: Path, *, last_step: int) -> Self:
        """Go on after `last_step`: later records and a torn last line are cut off.

        Steps that ran after the checkpoint will run again, and no step must stand there twice.

        Raises:
            ValueError: for a line that is broken although a newline ends it; names file and line.
                Also if there is no record of `last_step`: then metrics were lost.
        """
        content = path.read_bytes()
        end = 0
        kept_step: int | None = None
        num_dropped = 0
        for start, record in _records(path, content):
            if record.step <= last_step:
                kept_step = record.step
                end = content.index(b"\n", start) + 1
            else:
                num_dropped += 1
        if kept_step != last_step:
            found = "no record at all" if kept_step is None else f"step {kept_step}"
            message = (
                f"{path}: expected the record of step {last_step}, the last one before the "
                f"resumed run, got {found}; restore the file, or begin a new run"
            )
            raise ValueError(message)
        file = AppendedFile.reopen(path, end=end)
        return cls(path, file, last_step=kept_step, num_dropped=num_dropped)

    @property
    def num_dropped(self) -> int:
        """Whole records of later steps that `resume` cut off; 0 for a new file."""
        return self._num_dropped

    def write(self, step: int, values: Mapping[str, float]) -> StepRecord:
        """Append one record and wait until the disk has it.

        If that fails, for want of space say, the file is put back to its last whole record.

        Raises:
            ValueError: for an unknown name, a step that does not rise, or a closed writer.
            TypeError: for a value that is not a number.
            OSError: if the disk refuses.
        """
        if self._file.is_closed:
            message = f"{self._path}: cannot write step {step}, the writer is closed"
            raise ValueError(message)
        check_names(values)
        if self._last_step is not None and step <= self._last_step:
            message = (
                f"{self._path}: steps must rise, got step {step} after step {self._last_step}; "
                "to go back to an earlier step, open the file with MetricsWriter.resume"
            )
            raise ValueError(message)
        record = StepRecord(
            step=step,
            unix_seconds=time.time(),
            values={name: _plain(name, value) for name, value in values.items()},
        )
        self._file.append(record_line(record))
        self._last_step = step
        return record

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[StepRecord]:
    """All whole records of a file, in order; a torn last line is left out.

    Also reads a file that is being written.

    Raises:
        ValueError: for a line that is broken although a newline ends it; names file and line.
    """
    return [record for _, record in _records(path, path.read_bytes())]


def _records(path: Path, content: bytes) -> list[tuple[int, StepRecord]]:
    records: list[tuple[int, StepRecord]] = []
    start = 0
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        record = parse_record(line, f"{path}, line {number}")
        if records and record.step <= records[-1][1].step:
            message = (
                f"{path}, line {number}: steps must rise, got step {record.step} after "
                f"step {records[-1][1].step}; two runs wrote into one file"
            )
            raise ValueError(message)
        records.append((start, record))
        start += len(line) + 1
    return records


def parse_record(line: bytes, where: str) -> StepRecord:
    """Read one line of ``metrics.jsonl``.

    Args:
        line: with or without its newline.
        where: file and line, for the message.

    Raises:
        ValueError: if it is no record.
    """
    try:
        fields = json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
        message = f"{where}: expected one JSON object, got {line[:60]!r}: {error}"
        raise ValueError(message) from error
    if not isinstance(fields, dict):
        message = f"{where}: expected one JSON object, got {line[:60]!r}"
        raise ValueError(message)  # noqa: TRY004 - a broken file, not a caller's wrong type
    step = fields.pop("step", None)
    unix_seconds = fields.pop("unix_seconds", None)
    if type(step) is not int or not isinstance(unix_seconds, int | float):
        message = (
            f"{where}: expected the keys step (an integer) and unix_seconds (a number), "
            f"got {step!r} and {unix_seconds!r}"
        )
        raise ValueError(message)
    values: dict[str, float] = {}
    for name, value in fields.items():
        if isinstance(value, str) and value in _NON_FINITE:
            values[name] = _NON_FINITE[value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            values[name] = value
        else:
            message = f"{where}: expected a number for {name}, got {value!r}"
            raise ValueError(message)
    return StepRecord(step=step, unix_seconds=float(unix_seconds), values=values)


def _plain(name: str, value: float) -> float:
    # numpy's scalars are Real too; a tensor is not, and would have to be synchronised
    if isinstance(value, bool) or not isinstance(value, Real):
        message = f"metric {name}: expected a number, got {value!r} ({type(value).__name__})"
        raise TypeError(message)
    return value if type(value) is int else float(value)


def record_line(record: StepRecord) -> bytes:
    """The record as one line of ``metrics.jsonl``, its newline included."""
    fields: dict[str, int | float | str] = {
        "step": record.step,
        "unix_seconds": record.unix_seconds,
    }
    for name, value in record.values.items():
        fields[name] = value if math.isfinite(value) else str(float(value))
    return json.dumps(fields, allow_nan=False).encode() + b"\n"
