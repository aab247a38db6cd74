"""tools/bench.py, on a folder of small benchmarks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_contracts import load_config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from bench import BenchmarkError, BenchmarkList, Ratio, main, number_at, read_history, value_of

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, sys
from pathlib import Path
output = Path(sys.argv[sys.argv.index("--output") + 1])
state = Path(__file__).with_suffix(".count")
count = int(state.read_text()) if state.exists() else 0
state.write_text(str(count + 1))
print("measuring", *sys.argv[1:-2])
output.write_text(json.dumps({"plain": [3.0, 6.0 + count], "ours": {"s, median": 2.0}}))
"""

LIST = """
[benchmarks.quick]
about = "ours against plain"
script = "quick.py"
arguments = ["--tiny"]
minutes = 1
[[benchmarks.quick.ratios]]
name = "plain over ours"
value = ["plain", "-1"]
over = ["ours", "s, median"]
better = "higher"
[[benchmarks.quick.ratios]]
name = "ours"
value = ["ours", "s, median"]
better = "lower"

[benchmarks.large]
about = "on a cluster"
script = "quick.py"
num_gpus = 1000
minutes = 1
ratios = [{ name = "x", value = ["x"], better = "higher" }]

[benchmarks.broken]
about = "ends badly"
script = "broken.py"
minutes = 1
ratios = [{ name = "x", value = ["x"], better = "higher" }]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three benchmarks: one that runs, one that cannot run here, one that fails."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "quick.py").write_text(SCRIPT)
    (folder / "broken.py").write_text("import sys; sys.exit(3)")
    (folder / "benchmarks.toml").write_text(LIST)
    return folder


def bench(folder: Path, *arguments: str) -> int:
    return main([*arguments, "--folder", str(folder), "--output", str(folder / "out")])


def test_results_are_kept_and_set_beside_the_last_ones(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """6 / 2 the first time and 7 / 2 the second; the other benchmarks are left alone."""
    assert bench(folder, "quick") == 0
    first = capfd.readouterr().out
    assert "measuring --tiny" in first
    assert "plain over ours" in first
    assert "3.000  no earlier one; better: higher" in first
    assert bench(folder, "quick") == 0
    second = capfd.readouterr().out
    assert "3.500  before 3.000, +16.7% (" in second
    assert "2.000  before 2.000, +0.0% (" in second
    entries = read_history(folder / "history.jsonl")
    assert [entry.ratios["plain over ours"] for entry in entries] == [3.0, 3.5]
    assert entries[0].versions["python"] == sys.version.split()[0]
    assert "cores" in entries[0].machine
    assert entries[0].commit
    assert json.loads((folder / "out" / "quick.json").read_text())["plain"] == [3.0, 7.0]


def test_another_machine_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A ratio from elsewhere is shown for want of a better one, and says so."""
    assert bench(folder, "quick") == 0
    history = folder / "history.jsonl"
    entry = json.loads(history.read_text())
    entry["machine"] = "A large one"
    history.write_text(json.dumps(entry) + "\n")
    assert bench(folder, "quick") == 0
    assert ", on A large one)" in capfd.readouterr().out


def test_what_cannot_run_or_fails_does_not_stop_the_rest(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without names all are tried; the reasons are printed, and the exit status is 1."""
    assert bench(folder) == 1
    captured = capfd.readouterr()
    assert "large: skipped: needs 1000 NVIDIA GPUs, and this machine has " in captured.out
    assert "broken: failed: broken.py ended with exit status 3" in captured.err
    assert "failed: broken\n" in captured.err
    assert [entry.name for entry in read_history(folder / "history.jsonl")] == ["quick"]


def test_the_list_runs_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Name, purpose and what keeps it from running."""
    assert bench(folder, "--list") == 0
    out = capfd.readouterr().out
    assert "quick                    ours against plain  (about 1 min)" in out
    assert "on a cluster  (skipped: needs 1000 NVIDIA GPUs" in out
    assert not (folder / "quick.count").exists()


def test_an_earlier_result_does_not_pass_for_a_new_one(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script that writes nothing has failed, whatever lies there from before."""
    assert bench(folder, "quick") == 0
    (folder / "quick.py").write_text("pass")
    assert bench(folder, "quick") == 1
    assert "quick.py wrote no JSON to " in capfd.readouterr().err


def test_a_torn_line_of_the_history_is_cut_off(folder: Path) -> None:
    """What a kill left is no entry; a broken whole line is named."""
    assert bench(folder, "quick") == 0
    history = folder / "history.jsonl"
    with history.open("a") as file:
        file.write('{"name": "qu')
    assert bench(folder, "quick") == 0
    assert len(read_history(history)) == 2
    with history.open("a") as file:
        file.write("{}\n")
    with pytest.raises(ValueError, match=r"history\.jsonl, line 3: expected an entry"):
        read_history(history)


def test_wrong_commands_and_lists_are_refused(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An unknown name is answered with the known ones, a misspelt setting with its place."""
    with pytest.raises(SystemExit, match="2"):
        bench(folder, "quack")
    assert "no benchmark quack; there are quick, large, broken" in capfd.readouterr().err
    (folder / "benchmarks.toml").write_text(LIST.replace("num_gpus", "num_gpu"))
    with pytest.raises(SystemExit, match="2"):
        bench(folder)
    assert "num_gpu: unknown setting; did you mean " in capfd.readouterr().err


def test_a_ratio_that_is_not_there_is_named() -> None:
    """The missing part of the path, and what stands in its place."""
    result = {"a": [1.0, {"b": "x"}], "zero": 0}
    assert number_at(["a", "0"], result) == 1.0
    with pytest.raises(BenchmarkError, match="its JSON has no a/2; there is "):
        number_at(["a", "2"], result)
    with pytest.raises(BenchmarkError, match="its JSON has no c; there is a, zero"):
        number_at(["c"], result)
    with pytest.raises(BenchmarkError, match="expected a number at a/1/b, got 'x'"):
        number_at(["a", "1", "b"], result)
    with pytest.raises(BenchmarkError, match="ratio 'r': zero is 0"):
        value_of(Ratio(name="r", value=("a", "0"), over=("zero",), better="lower"), result)


def test_every_benchmark_of_the_repository_is_listed() -> None:
    """Each script that can be run has an entry, and each entry's script is there."""
    folder = ROOT / "benchmarks"
    known = load_config(BenchmarkList, file=folder / "benchmarks.toml").value.benchmarks
    scripts = {p.name for p in folder.glob("*.py") if "__main__" in p.read_text(encoding="utf-8")}
    assert {benchmark.script for benchmark in known.values()} == scripts


def test_the_ratios_are_where_the_benchmarks_write_them() -> None:
    """Every path of the list, on the results that the repository shows."""
    folder = ROOT / "benchmarks"
    known = load_config(BenchmarkList, file=folder / "benchmarks.toml").value.benchmarks
    ratios: dict[str, float] = {}
    for name, benchmark in known.items():
        for path in sorted((folder / "results").glob(f"{name}*.json")):
            if path.stem in known and path.stem != name:
                continue  # the result of an entry with a longer name
            result = json.loads(path.read_text(encoding="utf-8"))
            for ratio in benchmark.ratios:
                ratios[f"{name}: {ratio.name}"] = value_of(ratio, result)
    assert ratios["fsdp_step: plain over engine, 8 rows"] == pytest.approx(7.1784173 / 5.4263161)
    assert ratios["weight_stream: stream over bare broadcast"] == pytest.approx(1.4019882)
    assert len({name.partition(":")[0] for name in ratios}) >= 8


def test_help_says_how_to_use_it() -> None:
    """As a command."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "bench.py", "--help"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "benchmarks/benchmarks.toml" in done.stdout
