"""Names of data sets: every problem's must be one for which there is a reward."""

import difflib
from collections.abc import Collection

from rl_tasks.errors import TaskError


def data_source_problem(data_source: str, known: Collection[str]) -> str | None:
    """What is wrong with a data source, or None."""
    if data_source in known:
        return None
    listed = ", ".join(sorted(known)) or "none"
    if not data_source.strip():
        return f"data_source is blank ({data_source!r}); known: {listed}"
    nearest = difflib.get_close_matches(data_source, known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown data_source {data_source!r}; known: {listed}{hint}"


def check_data_source(data_source: str, known: Collection[str], where: str) -> None:
    """Refuse a data source that is not in `known`.

    Raises:
        TaskError: names `where` and lists the known ones.
    """
    problem = data_source_problem(data_source, known)
    if problem is not None:
        message = f"{where}: {problem}"
        raise TaskError(message)
