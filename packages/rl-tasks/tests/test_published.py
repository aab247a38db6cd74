"""Data sets as they are published: DAPO-Math-17k, AIME-2024, saved Hugging Face data sets."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import datasets  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_tasks import (
    ChatMessage,
    LastNumber,
    NothingLeftError,
    RowError,
    TaskError,
    generated_problems,
    load_problems,
)

MESSAGES = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))
REWARD = pa.struct([("ground_truth", pa.string()), ("style", pa.string())])


def published(
    path: Path,
    *,
    extra_info: pa.DataType,
    extras: Sequence[Mapping[str, object] | None],
    copies: int,
) -> Path:
    """A file with the columns and types of BytedTsinghua-SIA's, each problem `copies` times."""
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", MESSAGES),
            ("ability", pa.string()),
            ("reward_model", REWARD),
            ("extra_info", extra_info),
        ]
    )
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [
                {
                    "content": "Solve the following math problem step by step. The last line of "
                    "your response should be of the form Answer: $Answer (without quotes) where "
                    f"$Answer is the answer to the problem.\n\nWhat is {number} + 1?\n\nRemember "
                    'to put your answer on its own line after "Answer:".',
                    "role": "user",
                }
            ],
            "ability": "MATH",
            "reward_model": {
                "ground_truth": str(number + 1),
                "style": "rule-lighteval/MATH_v2",
            },
            "extra_info": extra,
        }
        for number, extra in enumerate(extras)
    ]
    pq.write_table(pa.Table.from_pylist(rows * copies, schema=schema), path)
    return path


def dapo(path: Path, *, copies: int) -> Path:
    uuid = "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"
    return published(
        path,
        extra_info=pa.struct([("index", pa.string())]),
        extras=[{"index": uuid}, {"index": uuid[::-1]}],
        copies=copies,
    )


# The file's extra_info is written down from memory, and its Arrow types are not known here: the
# loader must take any of these.
AIME_EXTRA_INFO: dict[str, tuple[pa.DataType, dict[str, object]]] = {
    "integers, texts and nulls": (
        pa.struct([("index", pa.int64()), ("raw_problem", pa.string()), ("split", pa.null())]),
        {"index": 0, "raw_problem": "0 + 1?", "split": None},
    ),
    "texts": (
        pa.struct([("index", pa.large_string()), ("split", pa.string())]),
        {"index": "2024-I-1", "split": "train"},
    ),
    "small numbers": (
        pa.struct([("index", pa.int32()), ("year", pa.uint16()), ("weight", pa.float32())]),
        {"index": 7, "year": 2024, "weight": 0.5},
    ),
    "lists and structs": (
        pa.struct([("index", pa.list_(pa.int64())), ("of", pa.struct([("id", pa.string())]))]),
        {"index": [1, 2], "of": {"id": "I"}},
    ),
    "a dictionary of texts": (
        pa.struct([("split", pa.dictionary(pa.int32(), pa.string()))]),
        {"split": "train"},
    ),
    "nothing": (pa.null(), {}),
}


def aime(path: Path, *, copies: int, kind: str = "integers, texts and nulls") -> Path:
    extra_info, extra = AIME_EXTRA_INFO[kind]
    return published(path, extra_info=extra_info, extras=[extra or None], copies=copies)


def test_dapo_math_loads_as_published_and_once_each(tmp_path: Path) -> None:
    """An index may be a UUID; of 100 copies one is left if asked for, and all are counted."""
    path = dapo(tmp_path / "dapo-math-17k.parquet", copies=100)
    loaded = load_problems([path], known_sources=["math_dapo"], repeated="drop")
    assert [problem.ground_truth for problem in loaded.problems] == ["1", "2"]
    assert loaded.problems[0].extra_info == {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"}
    assert [problem.problem_id for problem in loaded.problems] == [
        "dapo-math-17k.parquet#0",
        "dapo-math-17k.parquet#1",
    ]
    assert (loaded.num_rows, loaded.num_repeated, loaded.unusable) == (200, 198, {})
    assert loaded.ignored_columns == ("ability",)


@pytest.mark.parametrize("kind", AIME_EXTRA_INFO)
def test_aime_loads_with_its_copies_whatever_its_extra_info_is(tmp_path: Path, kind: str) -> None:
    """32 copies are 32 samples of an evaluation; they are kept, with ids of their own."""
    path = aime(tmp_path / "aime-2024.parquet", copies=32, kind=kind)
    loaded = load_problems([path], known_sources=["math_dapo"])
    assert len({problem.problem_id for problem in loaded.problems}) == 32
    assert loaded.num_repeated == 31
    assert loaded.problems[0].extra_info == AIME_EXTRA_INFO[kind][1]


def test_another_answer_or_source_is_no_repetition(tmp_path: Path) -> None:
    """Only what asks the same and has the same answer is the same."""
    path = dapo(tmp_path / "a.parquet", copies=1)
    rows = pq.read_table(path).to_pylist()
    changed = [
        rows[0],
        {**rows[0], "data_source": "other"},
        {**rows[0], "reward_model": {"ground_truth": "7", "style": "rule"}},
        {**rows[0], "extra_info": {"index": "other"}},
    ]
    pq.write_table(pa.Table.from_pylist(changed), path)
    loaded = load_problems([path], known_sources=None, repeated="drop")
    assert (len(loaded.problems), loaded.num_repeated) == (3, 1)


def test_a_saved_data_set_is_read_like_a_file(tmp_path: Path) -> None:
    """What save_to_disk wrote gives the problems that the parquet file gives."""
    path = dapo(tmp_path / "dapo.parquet", copies=2)
    datasets.Dataset(pq.read_table(path)).save_to_disk(str(tmp_path / "saved"))
    from_file = load_problems([path], known_sources=None)
    saved = load_problems([tmp_path / "saved"], known_sources={"math_dapo": LastNumber()})
    assert [problem.problem_id for problem in saved.problems] == [f"saved#{i}" for i in range(4)]
    for one, other in zip(from_file.problems, saved.problems, strict=True):
        assert (one.messages, one.ground_truth, one.data_source, one.extra_info) == (
            other.messages,
            other.ground_truth,
            other.data_source,
            other.extra_info,
        )


def test_a_broken_row_of_a_saved_data_set_names_folder_row_and_field(tmp_path: Path) -> None:
    """The folder takes the file's place; images stay bytes, and a bad one is refused by name."""
    rows = pq.read_table(dapo(tmp_path / "dapo.parquet", copies=1)).to_pylist()
    rows[1]["reward_model"] = {"ground_truth": None, "style": "rule"}
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "broken"))
    with pytest.raises(
        RowError, match=r"broken, row 1 \(from 0\), reward_model\.ground_truth: expected a string"
    ):
        load_problems([tmp_path / "broken"], known_sources=None)
    images = [{**rows[0], "images": [{"bytes": b"no image at all", "path": None}]}]
    datasets.Dataset.from_list(images).save_to_disk(str(tmp_path / "images"))
    with pytest.raises(
        NothingLeftError, match=r"images: 1; .*images\[0\]: expected an image file, got 15 bytes"
    ):
        load_problems([tmp_path / "images"], known_sources=None, unusable="drop")


def test_a_folder_of_splits_or_of_nothing_says_what_to_give(tmp_path: Path) -> None:
    """Which split is meant is not guessed."""
    table = datasets.Dataset(pq.read_table(dapo(tmp_path / "dapo.parquet", copies=1)))
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(TaskError, match=r"several splits; give the folder of one: .*both/train"):
        load_problems([tmp_path / "both"], known_sources=None)
    assert load_problems([tmp_path / "both" / "test"], known_sources=None).num_rows == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match=r"empty: expected a folder that datasets' save_to_disk"):
        load_problems([tmp_path / "empty"], known_sources=None)


def test_a_damaged_saved_data_set_is_named(tmp_path: Path) -> None:
    """Half a file, and files that say something else."""
    table = datasets.Dataset(pq.read_table(dapo(tmp_path / "dapo.parquet", copies=1)))
    for name, file, size in (("half", "data-00000-of-00001.arrow", 200), ("torn", "state.json", 9)):
        folder = tmp_path / name
        table.save_to_disk(str(folder))
        (folder / file).write_bytes((folder / file).read_bytes()[:size])
        with pytest.raises(TaskError, match=rf"{name}: not a readable folder of datasets'"):
            load_problems([folder], known_sources=None)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of cellpylib, which reasoning-gym imports
def test_generated_problems() -> None:
    """The same arguments give the same problems; settings and instructions take effect."""
    problems = generated_problems(
        "gcd", num_problems=3, seed=1, settings={"max_value": 50}, instruction="Number only."
    )
    assert problems == generated_problems(
        "gcd", num_problems=3, seed=1, settings={"max_value": 50}, instruction="Number only."
    )
    assert [problem.problem_id for problem in problems] == [
        f"reasoning_gym/gcd/1/{index}" for index in range(3)
    ]
    first = problems[0]
    assert first.data_source == "reasoning_gym/gcd"
    assert first.messages == (ChatMessage(role="user", content=first.messages[0].content),)
    assert first.messages[0].content.endswith("\n\nNumber only.")
    numbers = first.extra_info["numbers"]
    assert isinstance(numbers, list)
    assert all(isinstance(n, int) and n % int(first.ground_truth) == 0 for n in numbers)
    assert all(isinstance(n, int) and n <= 50 for n in numbers)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_generators_that_cannot_be_used_are_refused() -> None:
    """An unknown name, an unknown setting, and a scorer that would have to be evaluated here."""
    with pytest.raises(TaskError, match=r"unknown generator 'gdc'; reasoning-gym has .*gcd"):
        generated_problems("gdc", num_problems=1, seed=0)
    with pytest.raises(TaskError, match=r"generator 'gcd', settings {'max': 1}: .*'max'"):
        generated_problems("gcd", num_problems=1, seed=0, settings={"max": 1})
    with pytest.raises(TaskError, match="at least 1 problem, got 0"):
        generated_problems("gcd", num_problems=0, seed=0)
    with pytest.raises(TaskError, match="'countdown' has a scorer of its own, which is not used"):
        generated_problems("countdown", num_problems=1, seed=0)
    (problem,) = generated_problems("chain_sum", num_problems=1, seed=0, own_scorer="ignore")
    assert problem.ground_truth.lstrip("-").isdigit()
