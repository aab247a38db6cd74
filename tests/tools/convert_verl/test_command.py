"""The command: a file that a recipe takes, tables, JSON, and its exit status."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from convert_verl import main
from grpo_trainer.run_qwen3_1_7b_fsdp import full
from recipe import PromptFiles, Recipe
from verl_conversion.conversion import convert
from verl_conversion.labels import LABELS
from verl_conversion.launches import launch_of, read_launches
from verl_conversion.recipe_file import problems_of, recipe_toml
from verl_conversion.report import Report, print_report, report_json

from algos_gspo_dapo_grpo import GrpoLoss
from engine_fsdp import FsdpConfig
from engine_veomni import VeomniConfig
from rl_contracts import load_config

PAGE = Path(__file__).resolve().parents[3] / "docs" / "from_verl.md"
LAUNCHES = Path(__file__).resolve().parent / "launches"
TOOL = Path(__file__).resolve().parents[3] / "tools" / "convert_verl.py"
COMPLETE = (
    "-m",
    "verl.trainer.main_ppo",
    "algorithm.adv_estimator=grpo",
    "data.train_files=train.parquet",
    "data.val_files=test.parquet",
    "data.train_batch_size=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.model.path=/models/Qwen3-1.7B",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=8",
    "trainer.total_training_steps=50",
)
"""A launch of which everything is carried over."""


@pytest.mark.parametrize("name", ["veomni_gpu", "veomni_npu", "dapo30b_npu", "dapo7b"])
def test_a_recipe_takes_the_file(name: str) -> None:
    (launch,) = read_launches(LAUNCHES / f"{name}.json")
    text = recipe_toml(convert(launch, "0.9.1").settings, heading="a test")
    assert problems_of(text) == []


def test_the_loaded_recipe_says_what_the_launch_said(tmp_path: Path) -> None:
    """KL 0.001 with k3 in 200 steps of 8 prompts; experts over 8 devices in the sampler."""
    (launch,) = read_launches(LAUNCHES / "veomni_gpu.json")
    file = tmp_path / "recipe.toml"
    file.write_text(recipe_toml(convert(launch, "0.9.1").settings, heading=""), encoding="utf-8")
    recipe = load_config(Recipe, file=file).value
    assert isinstance(recipe.engine, VeomniConfig)
    assert isinstance(recipe.loop.loss, GrpoLoss)
    assert recipe.loop.loss.kl is not None
    assert (recipe.loop.loss.kl.coefficient, recipe.loop.loss.kl.estimator) == (0.001, "k3")
    assert (recipe.loop.num_steps, recipe.loop.groups_per_step) == (200, 8)
    assert recipe.engine.optim.total_steps == 200
    assert recipe.engine.parallel.extra_parallel_sizes["ep"] == 1
    assert (recipe.sampler.data_parallel_size, recipe.sampler.expert_parallel_size) == (8, 8)
    assert isinstance(recipe.data, PromptFiles)
    assert recipe.data.train == (Path("dapo-math-17k.parquet"),)


def test_asynchronous_and_sharded(tmp_path: Path) -> None:
    """4 copies over 2 ranks each; 16 steps between publishes, 4096 tokens of punishment."""
    (launch,) = read_launches(LAUNCHES / "dapo7b.json")
    file = tmp_path / "recipe.toml"
    file.write_text(recipe_toml(convert(launch, "0.9.0").settings, heading=""), encoding="utf-8")
    recipe = load_config(Recipe, file=file).value
    assert isinstance(recipe.engine, FsdpConfig)
    assert (recipe.engine.parallel.dp_size, recipe.engine.parallel.dp_replicate_size) == (8, 4)
    assert (recipe.loop.publish_every, recipe.loop.max_staleness) == (16, 17)
    assert recipe.loop.overlong is not None
    assert recipe.loop.overlong.buffer == 4096
    assert recipe.engine.optim.warmup_steps == 40


def test_what_a_recipe_would_refuse_is_reported() -> None:
    """The number of steps is required, and nothing said it."""
    argv = [*COMPLETE[:-1], "trainer.total_epochs=3"]
    text = recipe_toml(convert(launch_of(argv), "0.9.1").settings, heading="")
    assert any("loop.num_steps" in problem for problem in problems_of(text))


def test_all_carried_over_is_status_0_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.toml"
    status = main(["-o", str(file), "--", *COMPLETE])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "all carried over" in printed
    recipe = load_config(Recipe, file=file).value
    assert (recipe.loop.num_steps, recipe.loop.publish_every) == (100, 2)
    assert recipe.loop.max_tokens_per_micro_batch == 2048  # 2 rows of 512 + 512


def test_a_recipe_adds_nothing_of_its_own(tmp_path: Path) -> None:
    """verl has no KL term unless it is asked for; the recipe below has one, and compiled blocks."""
    file = tmp_path / "recipe.toml"
    assert main(["-o", str(file), "--", *COMPLETE]) == 0
    alone = load_config(Recipe, file=file).value
    assert load_config(Recipe, file=file, defaults=full()).value == alone
    assert isinstance(alone.loop.loss, GrpoLoss)
    assert alone.loop.loss.kl is None


def test_something_to_look_at_is_status_1_and_in_the_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(LAUNCHES / "dapo30b_npu.json"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["overrides"]) == 94
    assert found["program"] == "fully_async"
    traps = [line["override"] for line in found["overrides"] if "trap" in line["labels"]]
    assert "actor_rollout_ref.actor.use_torch_compile=False" in traps
    assert found["settings"]["loop.max_staleness"] == 3


def test_a_script_with_two_ways_asks_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    lines = [
        'if [ "$SIZE" = big ]; then n=16; else n=8; fi',
        f"python3 {' '.join(COMPLETE)} trainer.n_gpus_per_node=$n",
    ]
    script.write_text("\n".join(lines), encoding="utf-8")
    assert main([str(script)]) == 1
    assert "starts verl in 2 ways" in capsys.readouterr().out
    assert main([str(script), "--way", "2"]) == 0
    capsys.readouterr()
    assert main([str(script), "--with", "SIZE=big", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["engine.parallel.dp_size"] == 16
    assert main([str(script), "--way", "3"]) == 2
    assert "--way: expected 1 to 2, got 3" in capsys.readouterr().err


def test_input_that_cannot_be_read_is_status_2(tmp_path: Path) -> None:
    """As a user calls it, from elsewhere."""
    done = subprocess.run(
        [sys.executable, TOOL, "missing.sh"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "convert_verl: cannot read missing.sh" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a script, a JSON file, or arguments behind --"),
        (["--has", "vllm", "--", *COMPLETE], "--has: expected NAME==VERSION"),
        (["--has", "VLLM==1", "--", *COMPLETE], "expected the name 'vllm'"),
        (["--", *COMPLETE, "model_engine=megatron"], "expected dp (FSDP) or veomni"),
    ],
)
def test_arguments_that_cannot_be_used(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["80", "150"])
def test_there_is_a_line_for_every_override(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a table and as paragraphs: none is cut or left out."""
    monkeypatch.setenv("COLUMNS", columns)
    (launch,) = read_launches(LAUNCHES / "dapo7b.json")
    conversion = convert(launch, "0.9.1")
    report = Report(
        source="dapo7b.json", conversion=conversion, environment=[], notes=["a note"], problems=[]
    )
    page = io.StringIO()
    print_report(report, Console(file=page))
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert not [line for line in lines if line != line.rstrip()]
    text = "".join(lines).replace(" ", "")
    for line in conversion.lines:
        shown = line.override.replace("actor_rollout_ref.", "")
        assert shown[:40].replace(" ", "") in text, line.override
    assert "note a note" in page.getvalue()
    assert "7 to look at" not in page.getvalue()  # the note is one more


def test_the_json_has_every_override() -> None:
    (launch,) = read_launches(LAUNCHES / "dapo7b.json")
    conversion = convert(launch, "0.9.1")
    found = report_json(
        Report(source="", conversion=conversion, environment=[], notes=[], problems=[])
    )
    assert isinstance(found["overrides"], list)
    assert [line["override"] for line in found["overrides"]] == [
        argument.text for argument in launch.overrides
    ]


def test_the_page_shows_what_the_tool_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script in docs/from_verl.md is converted, and the page's output and TOML are the real."""
    monkeypatch.setenv("COLUMNS", "110")
    page = PAGE.read_text(encoding="utf-8")
    script, printed, settings = (
        page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("bash", "text", "toml")
    )
    file, output = tmp_path / "run_grpo.sh", tmp_path / "recipe.toml"
    file.write_text(script, encoding="utf-8")
    assert main([str(file), "--train-rows", "17398", "-o", str(output)]) == 1
    assert capsys.readouterr().out == printed
    assert settings in output.read_text(encoding="utf-8")


def test_the_page_lists_every_label() -> None:
    rows = [line.split(" | ")[0] for line in PAGE.read_text(encoding="utf-8").splitlines()]
    assert [f"| {label}" for label in LABELS if f"| {label}" not in rows] == []
