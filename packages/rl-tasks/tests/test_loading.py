"""Files of prompts."""

import datetime as dt
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_tasks import (
    AdditionConfig,
    ChatMessage,
    LastNumber,
    NothingLeftError,
    RowError,
    TaskError,
    addition_problems,
    load_problems,
    write_parquet,
)

ROW: dict[str, object] = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "What is 30 + 4?"}],
    "ability": "MATH",
    "reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": "34"},
    "extra_info": {"index": "9a9b6eb4"},
}
"""The columns and the style of DAPO-Math-17k as published."""


def row(**changes: object) -> dict[str, object]:
    return {**ROW, **changes}


def jsonl(path: Path, *rows: Mapping[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(path: Path, *rows: Mapping[str, object]) -> Path:
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return path


@pytest.mark.parametrize(("write", "suffix"), [(jsonl, "jsonl"), (parquet, "parquet")])
def test_a_row_becomes_a_problem(write: Callable[..., Path], suffix: str, tmp_path: Path) -> None:
    """Both formats give the same problem, and say which column nothing reads."""
    path = write(tmp_path / f"data.{suffix}", ROW)
    loaded = load_problems([path], known_sources=None)
    (problem,) = loaded.problems
    assert problem.problem_id == f"{path.name}#0"
    assert problem.messages == (ChatMessage(role="user", content="What is 30 + 4?"),)
    assert problem.ground_truth == "34"
    assert problem.data_source == "math_dapo"
    assert problem.extra_info == {"index": "9a9b6eb4"}
    assert loaded.ignored_columns == ("ability",)
    assert (loaded.num_rows, loaded.unusable) == (1, {})


def test_problems_survive_a_parquet_file(tmp_path: Path) -> None:
    """What is written in verl's schema is read back as it was, ids aside."""
    problems = addition_problems(AdditionConfig()).heldout
    path = tmp_path / "heldout.parquet"
    write_parquet(problems, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["heldout.parquet"]
    loaded = load_problems([path], known_sources={"addition": LastNumber()}).problems
    for read, written in zip(loaded, problems, strict=True):
        assert read.messages == written.messages
        assert read.ground_truth == written.ground_truth
        assert read.data_source == written.data_source
        assert read.extra_info == written.extra_info


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """Half a file never takes the place of a whole one, nor stays beside it."""
    path = tmp_path / "data.parquet"
    problems = addition_problems(AdditionConfig()).heldout
    write_parquet(problems, path)
    before = path.read_bytes()
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(IsADirectoryError):
        write_parquet(problems, tmp_path / "folder.parquet")
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data.parquet", "folder.parquet"]


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"prompt": "What?"}, "prompt", "expected a non-empty list .* got 'What.' "),
        ({"prompt": []}, "prompt", "expected a non-empty list"),
        ({"prompt": ["What?"]}, "prompt[0]", "expected {role, content}"),
        (
            {"prompt": [{"role": "human", "content": "?"}]},
            "prompt[0].role",
            "expected one of assistant, system, tool, user, got 'human'",
        ),
        (
            {"prompt": [{"role": "user", "content": None}]},
            "prompt[0].content",
            "expected a string, got nothing",
        ),
        (
            {"prompt": [{"role": "user", "content": "?", "tool_calls": [1]}]},
            "prompt[0].tool_calls",
            "messages with tool_calls are not supported",
        ),
        ({"reward_model": None}, "reward_model", "expected {style, ground_truth}, got nothing"),
        (
            {"reward_model": {"style": "rule", "ground_truth": 34}},
            "reward_model.ground_truth",
            r"expected a string, got 34 \(int\); write the answer as text",
        ),
        (
            {"reward_model": {"style": "model", "ground_truth": "34"}},
            "reward_model.style",
            "there is no reward model here",
        ),
        ({"extra_info": "x"}, "extra_info", "expected a mapping"),
        ({"videos": ["a.mp4"]}, "videos", "rows with videos are not supported"),
        ({"images": "a.png"}, "images", r"expected a list of {bytes, path}, got 'a.png' \(str\)"),
        ({"images": ["a.png"]}, "images[0]", "expected {bytes, path}, got a.png"),
        ({"images": [{"path": None}]}, "images[0]", "expected bytes or a path, got {'path': None}"),
        ({"images": [{"path": "no.png"}]}, "images[0]", "'no.png' cannot be read: .*No such file"),
        ({"images": [{"path": "https://x/y.png"}]}, "images[0]", "expected a local path, got"),
        ({"agent_name": "tool_agent"}, "agent_name", "single_turn_agent"),
        ({"data_source": None}, "data_source", "expected a string, got nothing"),
        ({"data_source": ""}, "data_source", r"data_source is blank \(''\)"),
    ],
)
def test_a_broken_row_names_its_file_row_and_field(
    changes: dict[str, object], field: str, text: str, tmp_path: Path
) -> None:
    """One broken row among good ones is found by its message."""
    path = jsonl(tmp_path / "data.jsonl", ROW, ROW, row(**changes), ROW)
    with pytest.raises(RowError, match=text) as caught:
        load_problems([path], known_sources=None)
    assert str(caught.value).startswith(f"{path}, line 3, {field}: ")
    assert caught.value.field == field


def test_a_broken_parquet_row_is_counted_from_zero_and_says_so(tmp_path: Path) -> None:
    """The number is the one that pandas shows."""
    path = parquet(tmp_path / "data.parquet", ROW, row(data_source=" "))
    with pytest.raises(RowError, match=r"data\.parquet, row 1 \(from 0\), data_source"):
        load_problems([path], known_sources=None)


@pytest.mark.parametrize(
    ("data_source", "text"),
    [
        ("", r"data_source is blank \(''\); known: addition, math_dapo"),
        ("adition", "unknown data_source 'adition'; known: addition, math_dapo; did you mean 'add"),
    ],
)
def test_an_unknown_data_source_is_an_error_at_load(
    data_source: str, text: str, tmp_path: Path
) -> None:
    """A33: not in the middle of a run, and with the names that there are rewards for."""
    path = jsonl(tmp_path / "data.jsonl", ROW, row(data_source=data_source))
    rewards = {"math_dapo": LastNumber(), "addition": LastNumber()}
    with pytest.raises(RowError, match=text):
        load_problems([path], known_sources=rewards)


def test_dropped_rows_are_counted_by_field(tmp_path: Path) -> None:
    """Nothing is dropped without being asked for, and nothing without being counted."""
    path = jsonl(
        tmp_path / "data.jsonl",
        row(prompt=[]),
        ROW,
        row(prompt=[{"role": "user", "content": None}]),
        row(data_source="other"),
    )
    loaded = load_problems([path], known_sources=["math_dapo"], unusable="drop")
    assert [problem.problem_id for problem in loaded.problems] == ["data.jsonl#1"]
    assert loaded.unusable == {"prompt": 2, "data_source": 1}
    assert loaded.num_rows == 4


def test_nothing_left_is_an_error_that_shows_the_first_row(tmp_path: Path) -> None:
    """A32: an empty data set is found at load."""
    path = jsonl(tmp_path / "data.jsonl", row(prompt=[]), row(data_source=""))
    with pytest.raises(
        NothingLeftError,
        match=r"0 of 2 rows left .* prompt: 1, data_source: 1; the first: .*line 1, prompt",
    ):
        load_problems([path], known_sources=None, unusable="drop")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(NothingLeftError, match=r"0 of 0 rows left of .*empty\.jsonl"):
        load_problems([empty], known_sources=None)


def test_ids_keep_files_of_the_same_name_apart(tmp_path: Path) -> None:
    """Two train files of two data sets give ids with their folders, wherever these lie."""
    paths = []
    for name in ("gsm8k", "math"):
        (tmp_path / name).mkdir()
        paths.append(jsonl(tmp_path / name / "train.jsonl", ROW))
    loaded = load_problems(paths, known_sources=None)
    assert [problem.problem_id for problem in loaded.problems] == [
        "gsm8k/train.jsonl#0",
        "math/train.jsonl#0",
    ]
    with pytest.raises(TaskError, match=r"gsm8k/train\.jsonl is given 2 times"):
        load_problems([paths[0], paths[0]], known_sources=None)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    """Half a parquet file, broken JSON and unknown suffixes are errors with the file's name."""
    whole = parquet(tmp_path / "whole.parquet", ROW).read_bytes()
    half = tmp_path / "half.parquet"
    half.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TaskError, match=r"half\.parquet: not a readable parquet file"):
        load_problems([half], known_sources=None)
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(json.dumps(ROW).encode() + b"\n\n" + b'{"data_source": "ma')
    with pytest.raises(TaskError, match=r"torn\.jsonl, line 3: expected one JSON object"):
        load_problems([torn], known_sources=None)
    listed = tmp_path / "list.jsonl"
    listed.write_text("[1]\n")
    with pytest.raises(
        TaskError, match=r"list\.jsonl, line 1: expected one JSON object, got b'\[1"
    ):
        load_problems([listed], known_sources=None)
    nan = tmp_path / "nan.jsonl"
    nan.write_text('{"data_source": NaN}\n')
    with pytest.raises(TaskError, match="NaN is not JSON"):
        load_problems([nan], known_sources=None)
    deep = tmp_path / "deep.jsonl"
    deep.write_text("[" * 100_000)
    with pytest.raises(TaskError, match=r"deep\.jsonl, line 1: expected one JSON object"):
        load_problems([deep], known_sources=None)
    with pytest.raises(
        TaskError, match=r"expected a \.parquet or \.jsonl file, or the folder .* suffix '\.csv'"
    ):
        load_problems([tmp_path / "data.csv"], known_sources=None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prompt": [{"role": [], "content": "?"}]}, r"prompt\[0\]\.role: expected one of .* \[\]"),
        ({"prompt": [{"role": "user", "content": "\ud83d"}]}, r"content: .* lone surrogate"),
        ({"agent_name": {}}, r"agent_name: expected no agent loop"),
    ],
)
def test_values_that_nothing_can_use_are_named_too(
    change: dict[str, object], text: str, tmp_path: Path
) -> None:
    """A list where a name stands, and half a character, which no tokenizer takes."""
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({**ROW, **change}))
    with pytest.raises(RowError, match=text):
        load_problems([path], known_sources=None)


def test_extra_info_holds_what_json_holds(tmp_path: Path) -> None:
    """Nested values are kept; a date, which JSON lacks, is refused with its path."""
    nested = {"tags": ["a"], "origin": {"page": 3, "exact": None}}
    path = parquet(tmp_path / "nested.parquet", row(extra_info=nested))
    assert load_problems([path], known_sources=None).problems[0].extra_info == nested
    dated = {"seen": [{"at": dt.date(2026, 1, 2)}]}
    path = parquet(tmp_path / "dated.parquet", row(extra_info=dated))
    with pytest.raises(RowError, match=r"extra_info\.seen\[0\]\.at: expected what JSON can hold"):
        load_problems([path], known_sources=None)


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading and writing parquet say what to install."""
    path = parquet(tmp_path / "data.parquet", ROW)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"install the extra rl-tasks\[parquet\]"):
        load_problems([path], known_sources=None)
    with pytest.raises(ImportError, match=r"install the extra rl-tasks\[parquet\]"):
        write_parquet(addition_problems(AdditionConfig()).heldout, path)
