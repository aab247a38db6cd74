"""Rows of prompt files, as Python objects: parquet, JSONL, and saved Hugging Face data sets."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rl_tasks.errors import TaskError

if TYPE_CHECKING:
    import pyarrow as pa

NEEDS_PYARROW = "parquet files need pyarrow; install the extra rl-tasks[parquet]"
_NEEDS_DATASETS = (
    "a folder of a Hugging Face data set needs datasets; install the extra rl-tasks[hugging-face]"
)
_BATCH = 1_000
"""Rows of a saved data set that are in memory at a time."""


class Row(NamedTuple):
    """One row of a file."""

    name: str
    """How messages call it, such as ``line 3`` or ``row 2 (from 0)``."""

    number: int
    """Of the row, from 0."""

    values: Mapping[str, object]


def reader(path: Path) -> Callable[[Path], Iterator[Row]]:
    """What reads a file or folder of this kind.

    Raises:
        TaskError: for a kind that nothing here reads.
    """
    if path.is_dir():
        return _hugging_face_rows
    match path.suffix:
        case ".parquet":
            return _parquet_rows
        case ".jsonl":
            return _jsonl_rows
        case suffix:
            message = (
                f"{path}: expected a .parquet or .jsonl file, or the folder of a Hugging Face data "
                f"set, got suffix {suffix!r}"
            )
            raise TaskError(message)


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(NEEDS_PYARROW) from error
    index = 0
    try:
        with pq.ParquetFile(path) as file:
            for row in _rows_of(file.iter_batches()):
                yield row
                index += 1
    except pa.ArrowException as error:
        message = f"{path}: not a readable parquet file, after row {index}: {error}"
        raise TaskError(message) from error


def _hugging_face_rows(path: Path) -> Iterator[Row]:
    try:
        import datasets  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra
        import pyarrow as pa  # noqa: PLC0415 - datasets needs it
    except ImportError as error:
        raise ImportError(_NEEDS_DATASETS) from error
    try:
        saved = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        message = (
            f"{path}: expected a folder that datasets' save_to_disk wrote, with dataset_info.json "
            f"and state.json: {error}"
        )
        raise TaskError(message) from error
    except Exception as error:  # whatever datasets meets in files that are not as it wrote them
        raise TaskError(_broken_folder(path, error)) from error
    if not isinstance(saved, datasets.Dataset):
        splits = ", ".join(str(path / name) for name in saved)
        message = f"{path}: holds several splits; give the folder of one: {splits}"
        raise TaskError(message)
    # as arrow, so that images stay bytes
    try:
        yield from _rows_of(saved.with_format("arrow").iter(batch_size=_BATCH))
    except pa.ArrowException as error:
        raise TaskError(_broken_folder(path, error)) from error


def _broken_folder(path: Path, error: Exception) -> str:
    said = f"{type(error).__name__}: {error}"
    return f"{path}: not a readable folder of datasets' save_to_disk: {said}"


def _rows_of(batches: "Iterator[pa.RecordBatch | pa.Table]") -> Iterator[Row]:
    index = 0
    for batch in batches:
        for values in batch.to_pylist():
            yield Row(f"row {index} (from 0)", index, values)
            index += 1


def _jsonl_rows(path: Path) -> Iterator[Row]:
    index = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:  # of JSON, of its encoding, of its depth
                message = f"{path}, line {number}: expected one JSON object: {error}"
                raise TaskError(message) from error
            if not isinstance(values, dict):
                message = f"{path}, line {number}: expected one JSON object, got {line[:60]!r}"
                raise TaskError(message)
            yield Row(f"line {number}", index, values)
            index += 1


def _refuse_constant(name: str) -> float:
    message = f"{name} is not JSON"
    raise ValueError(message)
