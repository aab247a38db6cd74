"""Files of prompts to problems: parquet, JSONL and saved data sets, all in verl's schema."""

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_tasks.atomic import write_rows
from rl_tasks.errors import NothingLeftError, RowError, TaskError
from rl_tasks.problem import Problem
from rl_tasks.readers import reader
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

    num_repeated: int
    """Rows that say the same as an earlier one; whether they are among `problems` was asked."""

    ignored_columns: tuple[str, ...]
    """Columns that stand in the files and that nothing reads."""


def load_problems(
    paths: Sequence[Path],
    *,
    known_sources: Collection[str] | None,
    unusable: Literal["error", "drop"] = "error",
    repeated: Literal["keep", "drop"] = "keep",
) -> LoadedProblems:
    """Read prompt files.

    A problem's id is its file's name, with the folders in which the given files differ, and the
    number of its row, from 0.

    Args:
        paths: ``.parquet`` (needs the extra ``rl-tasks[parquet]``) or ``.jsonl`` files, or folders
            that Hugging Face's ``save_to_disk`` wrote, of one split (``rl-tasks[hugging-face]``).
        known_sources: data sources that have a reward, usually the table of rewards itself; None
            does not check.
        unusable: ``error`` stops at the first row that cannot be used; ``drop`` leaves such rows
            out and counts them.
        repeated: what happens to a row with the prompt, the ground truth and the data source of
            an earlier one. ``keep`` makes it a problem of its own, as verl does; ``drop`` leaves it
            out. DAPO-Math-17k is published with every problem about 100 times, by accident as its
            authors say, and AIME-2024 with every problem 32 times, to be sampled as often: drop in
            the first, keep in the second.

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
    num_rows = num_repeated = 0
    seen: set[bytes] = set()
    for path, name in zip(paths, names, strict=True):
        for row in reader(path)(path):
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
                continue
            identity = _identity(problem)
            num_repeated += identity in seen
            if identity not in seen or repeated == "keep":
                problems.append(problem)
            seen.add(identity)
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
        num_repeated=num_repeated,
        ignored_columns=tuple(sorted(columns - set(READ_COLUMNS) - set(CHECKED_COLUMNS))),
    )


def write_parquet(problems: Sequence[Problem], path: Path) -> None:
    """Write problems in verl's schema, by one rename. Needs the extra ``rl-tasks[parquet]``.

    Parquet has one set of `extra_info` keys for the whole file: where a problem lacks one, it is
    read back as None.

    Raises:
        ImportError: without pyarrow; names the extra.
    """
    write_rows([to_row(problem) for problem in problems], path)


def _identity(problem: Problem) -> bytes:
    """The same for two problems that ask the same and have the same answer."""
    said: tuple[object, ...] = (problem.data_source, problem.ground_truth, problem.messages)
    identity = hashlib.blake2b(repr(said).encode(errors="surrogatepass"), digest_size=16)
    for image in problem.images:
        identity.update(len(image).to_bytes(8))
        identity.update(image)
    return identity.digest()


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
