"""Published data sets to verl's schema."""

import io
import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rl_tasks import NothingLeftError, RowError, TaskError, load_problems, prepare
from rl_tasks.cli import main


def table(path: Path, *rows: Mapping[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return path


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (10, 20, 30)).save(file, format="PNG")
    return file.getvalue()


PNG = png()
GSM8K = {
    "question": "Natalia sold 48 clips, then half as many. How many?",
    "answer": "She sold 48/2 = <<48/2=24>>24.\n48+24 = <<48+24=72>>72.\n#### 1,072",
}
MATH = {
    "problem": "What is $\\frac{1}{2}$ of 3?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": "It is $\\boxed{\\frac{3}{2}}$.",
}
GEOMETRY = {
    "images": [{"bytes": PNG, "path": "images/0.png"}],
    "problem": "<image>Find x.",
    "answer": "3",
}


def test_gsm8k(tmp_path: Path) -> None:
    """The row that verl's script makes, in the split that was asked for, readable here."""
    table(tmp_path / "gsm8k" / "main" / "train-00000-of-00001.parquet", GSM8K)
    table(tmp_path / "gsm8k" / "main" / "test-00000-of-00001.parquet", GSM8K, GSM8K)
    output = tmp_path / "train.parquet"
    counts = prepare("gsm8k", source=tmp_path / "gsm8k", output=output, split="train")
    assert (counts.num_rows, counts.num_written, counts.num_repeated) == (1, 1, 0)
    (row,) = pq.read_table(output).to_pylist()
    assert row == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": f"{GSM8K['question']} Let's think step by step and output the final "
                'answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1072"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "answer": GSM8K["answer"],
            "question": GSM8K["question"],
        },
    }
    assert load_problems([output], known_sources=["openai/gsm8k"]).problems[0].ground_truth == (
        "1072"
    )


def test_math(tmp_path: Path) -> None:
    r"""The last box of the solution, also one that is written ``\boxed 2``."""
    bare = {**MATH, "problem": "Other", "solution": "So $\\boxed 2$."}
    table(tmp_path / "in" / "train-0.parquet", MATH, bare)
    output = tmp_path / "math.parquet"
    prepare("math", source=tmp_path / "in", output=output, split="train")
    problems = load_problems([output], known_sources=None).problems
    assert [problem.ground_truth for problem in problems] == [r"\frac{3}{2}", "2"]
    assert problems[0].data_source == "DigitalLearningGmbH/MATH-lighteval"
    assert (
        problems[0]
        .messages[0]
        .content.endswith(
            "of 3? Let's think step by step and output the final answer within \\boxed{}."
        )
    )


def dapo(prompt: str, answer: str) -> dict[str, object]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": prompt, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"uuid of {prompt}"},
    }


def test_dapo_math_is_written_once_and_without_contradictions(tmp_path: Path) -> None:
    """Copies are left out, and so is a prompt that has two different answers."""
    rows = [dapo("a", "1"), dapo("b", "2"), dapo("b", "3"), dapo("c", "4")] * 3
    table(tmp_path / "in" / "dapo-math-17k.parquet", *rows)
    output = tmp_path / "dapo.parquet"
    counts = prepare("dapo-math", source=tmp_path / "in", output=output, split=None)
    assert (counts.num_rows, counts.num_written) == (12, 2)
    assert (counts.num_repeated, counts.num_contradictory) == (8, 2)
    assert pq.read_table(output).to_pylist() == [dapo("a", "1"), dapo("c", "4")]


def test_geometry3k_keeps_its_images(tmp_path: Path) -> None:
    """Images are bytes and path, as verl reads them; what was written is read back with them."""
    table(tmp_path / "in" / "test-0.parquet", GEOMETRY)
    output = tmp_path / "geometry.parquet"
    prepare("geometry3k", source=tmp_path / "in", output=output, split="test")
    (row,) = pq.read_table(output).to_pylist()
    assert row["images"] == [{"bytes": PNG, "path": None}]
    assert row["prompt"][0]["content"].startswith("<image>Find x. You FIRST think about")
    assert row["reward_model"] == {"style": "rule", "ground_truth": "3"}
    (problem,) = load_problems([output], known_sources=None).problems
    assert problem.images == (PNG,)
    assert problem.data_source == "hiyouga/geometry3k"
    table(tmp_path / "in" / "test-0.parquet", {**GEOMETRY, "problem": "Find x."})
    with pytest.raises(RowError, match="problem: expected one <image> for each of 1 images, got 0"):
        prepare("geometry3k", source=tmp_path / "in", output=output, split="test")
    broken = {**GEOMETRY, "images": [{"bytes": PNG[:20], "path": None}]}
    table(tmp_path / "in" / "test-0.parquet", broken)
    with pytest.raises(RowError, match=r"row 0 \(from 0\), images\[0\]: expected an image file"):
        prepare("geometry3k", source=tmp_path / "in", output=output, split="test")


def test_images_beside_the_published_file_come_along(tmp_path: Path) -> None:
    """A path is read from the folder of the published file, and written as bytes."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one.png").write_bytes(PNG)
    given = {**GEOMETRY, "images": [{"bytes": None, "path": "one.png"}]}
    table(tmp_path / "in" / "test-0.parquet", given)
    output = tmp_path / "elsewhere.parquet"
    prepare("geometry3k", source=tmp_path / "in", output=output, split="test")
    (problem,) = load_problems([output], known_sources=None).problems
    assert problem.images == (PNG,)


def test_a_row_without_an_answer_is_named_or_counted(tmp_path: Path) -> None:
    """File, row and field; or left out and counted; never a file without rows."""
    path = table(tmp_path / "in" / "train-0.parquet", GSM8K, {**GSM8K, "answer": "72"})
    output = tmp_path / "out.parquet"
    with pytest.raises(
        RowError, match=r"train-0\.parquet, row 1 \(from 0\), answer: expected '###"
    ):
        prepare("gsm8k", source=tmp_path / "in", output=output, split="train")
    assert not output.exists()
    counts = prepare("gsm8k", source=tmp_path / "in", output=output, split="train", unusable="drop")
    assert (counts.num_written, counts.unusable) == (1, {"answer": 1})
    table(path, {**GSM8K, "answer": "72"})
    with pytest.raises(NothingLeftError, match=r"0 of 1 rows left .*'answer': 1"):
        prepare("gsm8k", source=tmp_path / "in", output=output, split="train", unusable="drop")


def test_what_cannot_be_prepared_says_what_to_do(tmp_path: Path) -> None:
    """A missing split, one too many, missing files, another suffix."""
    out = tmp_path / "o.parquet"
    with pytest.raises(TaskError, match="gsm8k is published in parts; choose the split train"):
        prepare("gsm8k", source=tmp_path, output=out, split=None)
    with pytest.raises(TaskError, match="published as one; leave the split 'train' out"):
        prepare("dapo-math", source=tmp_path, output=out, split="train")
    with pytest.raises(TaskError, match=r"no file train\*\.parquet .* fetch the folder main/"):
        prepare("gsm8k", source=tmp_path, output=out, split="train")
    with pytest.raises(TaskError, match=r"unknown data set 'gsm'; known: gsm8k, math"):
        prepare("gsm", source=tmp_path, output=out, split="train")
    with pytest.raises(TaskError, match=r"ends in \.parquet, got .*o\.jsonl"):
        prepare("gsm8k", source=tmp_path, output=tmp_path / "o.jsonl", split="train")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what became of the rows, or the reason why nothing did."""
    table(tmp_path / "in" / "train-0.parquet", GSM8K, GSM8K)
    output = tmp_path / "out.parquet"
    arguments = ["prepare", "gsm8k", "--source", str(tmp_path / "in"), "--output", str(output)]
    assert main(arguments) == 1
    assert "choose the split train or test" in capsys.readouterr().err
    assert main([*arguments, "--split", "train"]) == 0
    assert capsys.readouterr().out == (
        f"{output}: 1 of 2 rows; left out: 1 repeated, 0 with the same prompt and different "
        "answers, unusable by field: none\n"
    )


def test_rows_that_do_not_fit_one_table_are_no_traceback(tmp_path: Path) -> None:
    """An index that is a number in one row and a text in another; the old output stays."""
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": index},
        }
        for question, index in (("a", 1), ("b", "c"))
    ]
    source = tmp_path / "published"
    source.mkdir()
    (source / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "dapo.parquet"
    output.write_bytes(b"old")
    with pytest.raises(TaskError, match=r"dapo\.parquet: the rows do not fit one parquet table"):
        prepare("dapo-math", source=source, output=output, split=None)
    assert output.read_bytes() == b"old"


def test_a_published_file_is_neither_replaced_nor_joined(tmp_path: Path) -> None:
    """An output that would be read as published, now or the next time, is refused."""
    file = table(tmp_path / "main" / "train-0.parquet", GSM8K)
    before = file.read_bytes()
    for output in (file, tmp_path / "main" / "train.parquet"):
        with pytest.raises(TaskError, match="lies among the published files"):
            prepare("gsm8k", source=tmp_path, output=output, split="train")
    assert file.read_bytes() == before
    prepare("gsm8k", source=tmp_path, output=tmp_path / "out.parquet", split="train")


def test_an_answer_without_a_digit_is_none(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "How many?", "answer": "#### ,"}')
    with pytest.raises(RowError, match=r"answer: expected '#### <number>'"):
        prepare("gsm8k", source=tmp_path, output=tmp_path / "o.parquet", split="train")
