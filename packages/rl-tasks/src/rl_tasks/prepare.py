"""Published data sets to files in verl's schema, row by row as verl's own scripts make them.

Nothing is downloaded: the published files are given as a local folder, and `PUBLISHED` says which.
Prompts and data sources are those of verl's ``examples/data_preprocess``, so that a run here and a
run there ask the same questions.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rl_tasks.atomic import write_rows
from rl_tasks.boxed import last_complete_box
from rl_tasks.errors import NothingLeftError, RowError, TaskError
from rl_tasks.readers import Row, reader
from rl_tasks.verl_schema import parse_row

Split = Literal["train", "test"]

_GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s$]+)")


class _MakeError(ValueError):
    """A row that cannot be used: which field, and why."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


class Published(NamedTuple):
    """How a data set is published."""

    where: str
    """What to fetch, for messages."""

    has_splits: bool
    make: Callable[[Row, str], dict[str, object]]
    """One published row, and the name of its split, to one row in verl's schema."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedCounts:
    """What became of the rows."""

    num_rows: int
    num_written: int
    num_repeated: int
    """Left out: the same prompt and ground truth as an earlier row."""

    num_contradictory: int
    """Left out, all of them: rows with the same prompt and different ground truths."""

    unusable: Mapping[str, int]
    """Left out, by the field that was wrong."""


def prepare(
    data_set: str,
    *,
    source: Path,
    output: Path,
    split: Split | None,
    unusable: Literal["error", "drop"] = "error",
) -> PreparedCounts:
    """Turn the published files of a data set into one parquet file in verl's schema.

    A problem is written once, however often it is published, and never with two answers.

    Args:
        data_set: one of `PUBLISHED`.
        source: folder that holds the published files, at any depth.
        output: a ``.parquet`` file, replaced by one rename; not among the published ones.
        split: which part, for those that are published in parts; None for the others.
        unusable: ``error`` stops at the first row that cannot be used; ``drop`` leaves such rows
            out and counts them.

    Raises:
        RowError: for a row that cannot be used, if that is an error; names file, row and field.
        TaskError: for an unknown data set, a split that there is not, or missing files.
        NothingLeftError: if no row can be used.
    """
    published = PUBLISHED.get(data_set)
    if published is None:
        message = f"unknown data set {data_set!r}; known: {', '.join(PUBLISHED)}"
        raise TaskError(message)
    if output.suffix != ".parquet":
        message = f"expected an output file that ends in .parquet, got {output}"
        raise TaskError(message)
    files = _files(data_set, published, source, split)
    if output.name.startswith(split or "") and output.resolve().is_relative_to(source.resolve()):
        message = (
            f"{output} lies among the published files of {source}: it would replace one, or be "
            "read as one the next time; give an output outside of that folder"
        )
        raise TaskError(message)
    kept: dict[bytes, dict[str, object]] = {}
    answers: dict[bytes, set[str]] = {}
    dropped: Counter[str] = Counter()
    num_rows = num_repeated = 0
    first_error: RowError | None = None
    for file in files:
        for row in reader(file)(file):
            num_rows += 1
            try:
                made = _made(published, row, file, split or "train")
            except RowError as error:
                if unusable == "error":
                    raise
                first_error = first_error or error
                dropped[error.reason] += 1
                continue
            prompt, answer = _identity(made)
            num_repeated += answer in answers.get(prompt, set())
            kept.setdefault(prompt, made)
            answers.setdefault(prompt, set()).add(answer)
    contradictory = {prompt for prompt, known in answers.items() if len(known) > 1}
    rows = [made for prompt, made in kept.items() if prompt not in contradictory]
    if not rows:
        shown = f"; the first: {first_error}" if first_error else ""
        message = f"0 of {num_rows} rows left of {source}; unusable: {dict(dropped)}{shown}"
        raise NothingLeftError(message)
    write_rows(rows, output)
    return PreparedCounts(
        num_rows=num_rows,
        num_written=len(rows),
        num_repeated=num_repeated,
        num_contradictory=sum(len(answers[prompt]) for prompt in contradictory),
        unusable=dict(dropped),
    )


def _files(data_set: str, published: Published, source: Path, split: Split | None) -> list[Path]:
    if published.has_splits and split is None:
        message = f"{data_set} is published in parts; choose the split train or test"
        raise TaskError(message)
    if not published.has_splits and split is not None:
        message = f"{data_set} is published as one; leave the split {split!r} out"
        raise TaskError(message)
    files = sorted(
        path
        for path in source.rglob(f"{split or ''}*")
        if path.suffix in {".parquet", ".jsonl"} and path.is_file()
    )
    if not files:
        message = (
            f"no file {split or ''}*.parquet or {split or ''}*.jsonl in {source}; fetch "
            f"{published.where} and give the folder in which it lies"
        )
        raise TaskError(message)
    return files


def _made(published: Published, row: Row, file: Path, split: str) -> dict[str, object]:
    try:
        made = published.make(row, split)
    except _MakeError as error:
        raise RowError(
            path=file, row=row.name, field=error.field, reason=error.field, problem=str(error)
        ) from error
    # what is written can be read, wherever it lies
    problem = parse_row(made, path=file, row_name=row.name, problem_id="-", known_sources=None)
    if problem.images:
        made["images"] = [{"bytes": data, "path": None} for data in problem.images]
    return made


def _identity(made: Mapping[str, object]) -> tuple[bytes, str]:
    """What is asked, images included, and what is right."""
    asked = repr((made["prompt"], made.get("images")))
    reward_model = made["reward_model"]
    assert isinstance(reward_model, dict)  # noqa: S101 - parsed before
    return hashlib.blake2b(asked.encode(errors="surrogatepass")).digest(), reward_model[
        "ground_truth"
    ]


def _text(row: Row, field: str) -> str:
    value = row.values.get(field)
    if not isinstance(value, str) or not value.strip():
        shown = "nothing" if value is None else repr(value)[:60]
        raise _MakeError(field, f"expected a text, got {shown}")
    return value


def _verl_row(  # noqa: PLR0917 - a row's columns
    data_source: str, question: str, answer: str, split: str, row: Row, extra: dict[str, str]
) -> dict[str, object]:
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": row.number, **extra},
    }


def _gsm8k(row: Row, split: str) -> dict[str, object]:
    question, solution = _text(row, "question"), _text(row, "answer")
    found = _GSM8K_ANSWER.search(solution)
    if found is None or not any(map(str.isdigit, found[1])):
        raise _MakeError("answer", f"expected '#### <number>', got {solution[-60:]!r}")
    asked = f'{question} Let\'s think step by step and output the final answer after "####".'
    return _verl_row(
        "openai/gsm8k",
        asked,
        found[1].replace(",", ""),
        split,
        row,
        {"answer": solution, "question": question},
    )


def _math(row: Row, split: str) -> dict[str, object]:
    question, solution = _text(row, "problem"), _text(row, "solution")
    answer = last_complete_box(solution)
    if answer is None:
        bare = _BARE_BOX.findall(solution)
        answer = bare[-1] if bare else None
    if answer is None or not answer.strip():
        raise _MakeError("solution", f"expected a \\boxed{{}} answer, got {solution[-60:]!r}")
    asked = f"{question} Let's think step by step and output the final answer within \\boxed{{}}."
    return _verl_row("DigitalLearningGmbH/MATH-lighteval", asked, answer, split, row, {})


def _dapo_math(row: Row, split: str) -> dict[str, object]:
    del split
    return dict(row.values)  # published in verl's schema


def _geometry3k(row: Row, split: str) -> dict[str, object]:
    question, answer = _text(row, "problem"), _text(row, "answer")
    images = row.values.get("images")
    if not isinstance(images, list) or not images:
        raise _MakeError("images", "expected at least one image")
    if question.count("<image>") != len(images):
        raise _MakeError(
            "problem",
            f"expected one <image> for each of {len(images)} images, "
            f"got {question.count('<image>')}",
        )
    asked = (
        f"{question} You FIRST think about the reasoning process as an internal monologue and then "
        "provide the final answer. The reasoning process MUST BE enclosed within <think> </think> "
        "tags. The final answer MUST BE put in \\boxed{}."
    )
    made = _verl_row(
        "hiyouga/geometry3k", asked, answer, split, row, {"answer": answer, "question": question}
    )
    return {**made, "images": images}


PUBLISHED: Mapping[str, Published] = {
    "gsm8k": Published(
        "the folder main/ (train-*.parquet, test-*.parquet) of openai/gsm8k on Hugging Face",
        has_splits=True,
        make=_gsm8k,
    ),
    "math": Published(
        "the folder data/ (train-*.parquet, test-*.parquet) of DigitalLearningGmbH/MATH-lighteval "
        "on Hugging Face",
        has_splits=True,
        make=_math,
    ),
    "dapo-math": Published(
        "data/dapo-math-17k.parquet of BytedTsinghua-SIA/DAPO-Math-17k on Hugging Face",
        has_splits=False,
        make=_dapo_math,
    ),
    "geometry3k": Published(
        "the folder data/ (train-*.parquet, test-*.parquet) of hiyouga/geometry3k on Hugging Face",
        has_splits=True,
        make=_geometry3k,
    ),
}
"""Data sets that can be prepared, and what to fetch for each."""
