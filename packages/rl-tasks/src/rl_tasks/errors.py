"""What goes wrong with data.

::

    TaskError (a ValueError)
    ├── RowError          one row of a file cannot be used
    └── NothingLeftError  none of the rows can
"""

from pathlib import Path


class TaskError(ValueError):
    """A data set that cannot be used as it is."""


class RowError(TaskError):
    """One row that cannot be used: in which file, which row, which field, and why."""

    def __init__(self, *, path: Path, row: str, field: str, reason: str, problem: str) -> None:
        super().__init__(f"{path}, {row}, {field}: {problem}")
        self.path = path
        self.row = row
        self.field = field
        self.reason = reason


class NothingLeftError(TaskError):
    """All rows were dropped; the message counts them by reason."""
