"""Parquet files that are whole or not there."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_tasks.errors import TaskError
from rl_tasks.readers import NEEDS_PYARROW


def write_rows(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write rows as parquet, by one rename.

    Raises:
        ImportError: without pyarrow; names the extra.
        TaskError: if the rows do not fit one table, as where a field is a number in one row and a
            text in another.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(NEEDS_PYARROW) from error
    try:
        table = pa.Table.from_pylist([dict(row) for row in rows])
    except (pa.ArrowException, UnicodeEncodeError) as error:
        message = f"{path}: the rows do not fit one parquet table: {error}"
        raise TaskError(message) from error
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
            # mkstemp makes files that only their owner reads
            os.fchmod(file.fileno(), 0o644)
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, pa.ArrowException):
            message = f"{path}: the rows do not fit a parquet file: {error}"
            raise TaskError(message) from error
        raise
