"""Parquet files that are whole or not there."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_tasks.readers import NEEDS_PYARROW


def write_rows(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write rows as parquet, by one rename.

    Raises:
        ImportError: without pyarrow; names the extra.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(NEEDS_PYARROW) from error
    table = pa.Table.from_pylist([dict(row) for row in rows])
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
