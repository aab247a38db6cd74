"""Files of prompts to problems: parquet and JSONL, both in verl's schema."""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rl_tasks.errors import NothingLeftError, RowError, TaskError
from rl_tasks.problem import Problem
from rl_tasks.verl_schema import CHECKED_COLUMNS, READ_COLUMNS, parse_row, to_row


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedProblems:
    """What came out of the files, and what did not."""

    problems: tuple[Problem, ...]
    """In the order of the files and their rows."""

    num_rows: int
    """Rows that were read."""

    unusable: Mapping[str, int]
    """Rows that were dropped, by the field that was wrong; empty unless dropping was asked for."""

    ignored_columns: tuple[str, ...]
    """Columns that stand in the files and that nothing reads."""


class _Row(NamedTuple):
    name: str
    number: int
    values: Mapping[str, object]


def load_problems(
    paths: Sequence[Path],
    *,
    known_sources: Collection[str] | None,
    unusable: Literal["error", "drop"] = "error",
) -> LoadedProblems:
    """Read prompt files.

    A problem's id is its file's name, with the folders in which the given files differ, and the
    number of its row, from 0.

    Args:
        paths: ``.parquet`` (needs the extra ``rl-tasks[parquet]``) or ``.jsonl`` files.
        known_sources: data sources that have a reward, usually the table of rewards itself; None
            does not check.
        unusable: ``error`` stops at the first row that cannot be used; ``drop`` leaves such rows
            out and counts them.

    Raises:
        RowError: for a row that cannot be used, if that is an error.
        NothingLeftError: if no row can be used.
        TaskError: for a file that cannot be read, or that is given twice.
    """
    names = _names(paths)
    problems: list[Problem] = []
    dropped: Counter[str] = Counter()
    columns: set[str] = set()
    first_error: RowError | None = None
    num_rows = 0
    for path, name in zip(paths, names, strict=True):
        for row in _reader(path)(path):
            num_rows += 1
            columns.update(row.values)
            try:
                problem = parse_row(
                    row.values,
                    path=path,
                    row_name=row.name,
                    problem_id=f"{name}#{row.number}",
                    known_sources=known_sources,
                )
            except RowError as error:
                if unusable == "error":
                    raise
                first_error = first_error or error
                dropped[error.reason] += 1
            else:
                problems.append(problem)
    if not problems:
        counts = ", ".join(f"{reason}: {count}" for reason, count in dropped.most_common())
        message = f"0 of {num_rows} rows left of {', '.join(map(str, paths)) or 'no files'}"
        if first_error is not None:
            message += f"; unusable by field: {counts}; the first: {first_error}"
        raise NothingLeftError(message)
    return LoadedProblems(
        problems=tuple(problems),
        num_rows=num_rows,
        unusable=dict(dropped),
        ignored_columns=tuple(sorted(columns - set(READ_COLUMNS) - set(CHECKED_COLUMNS))),
    )


def write_parquet(problems: Sequence[Problem], path: Path) -> None:
    """Write problems in verl's schema, by one rename. Needs the extra ``rl-tasks[parquet]``.

    Parquet has one set of `extra_info` keys for the whole file: where a problem lacks one, it is
    read back as None.

    Raises:
        ImportError: without pyarrow; names the extra.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(_NEEDS_PYARROW) from error
    table = pa.Table.from_pylist([to_row(problem) for problem in problems])
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
            # mkstemp makes files that only their owner reads
            os.fchmod(file.fileno(), 0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


_NEEDS_PYARROW = "parquet files need pyarrow; install the extra rl-tasks[parquet]"


def _names(paths: Sequence[Path]) -> list[str]:
    resolved = [path.resolve() for path in paths]
    for path, count in Counter(resolved).items():
        if count > 1:
            message = f"{path} is given {count} times; give each file once"
            raise TaskError(message)
    if not resolved:
        return []
    common = Path(os.path.commonpath([path.parent for path in resolved]))
    return [path.relative_to(common).as_posix() for path in resolved]


def _reader(path: Path) -> Callable[[Path], Iterator[_Row]]:
    match path.suffix:
        case ".parquet":
            return _parquet_rows
        case ".jsonl":
            return _jsonl_rows
        case suffix:
            message = f"{path}: expected a .parquet or .jsonl file, got suffix {suffix!r}"
            raise TaskError(message)


def _parquet_rows(path: Path) -> Iterator[_Row]:
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(_NEEDS_PYARROW) from error
    index = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    yield _Row(f"row {index} (from 0)", index, values)
                    index += 1
    except pa.ArrowException as error:
        message = f"{path}: not a readable parquet file, after row {index}: {error}"
        raise TaskError(message) from error


def _jsonl_rows(path: Path) -> Iterator[_Row]:
    index = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line, parse_constant=_refuse_constant)
            except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
                message = f"{path}, line {number}: expected one JSON object: {error}"
                raise TaskError(message) from error
            if not isinstance(values, dict):
                message = f"{path}, line {number}: expected one JSON object, got {line[:60]!r}"
                raise TaskError(message)
            yield _Row(f"line {number}", index, values)
            index += 1


def _refuse_constant(name: str) -> float:
    message = f"{name} is not JSON"
    raise ValueError(message)
