"""The tools and benchmarks run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_step_benchmark_runs(tmp_path: Path) -> None:
    """It measures four variants and writes what it printed."""
    output = tmp_path / "result.json"
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "benchmarks" / "fsdp_step.py",
            *("--tiny", "--repeats", "1", "--output", output),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    measured = json.loads(output.read_text())["measured"]
    assert len(measured) == 4
    assert all(name in done.stdout for name in measured)


def test_the_engine_is_one_line(tmp_path: Path) -> None:
    """Swapping the engine of an example changes the one line that imports it."""
    source = (ROOT / "examples" / "grpo_moe.py").read_text(encoding="utf-8")
    lines = [line for line in source.splitlines() if "engine_veomni" in line and "import" in line]
    assert len([line for line in lines if line.startswith("from engine_veomni")]) == 1
    (import_line,) = (line for line in lines if line.startswith("from engine_veomni"))
    swapped = source.replace(
        import_line,
        "from engine_fsdp import OptimConfig, FsdpConfig as Config, FsdpEngine as ChosenEngine",
    )
    script = tmp_path / "swapped.py"
    script.write_text(swapped, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script, "--dry-run", "parallel.extra_parallel_sizes.ep=1"],
        check=False,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / "examples"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "engine.model_path" in done.stdout
    assert "(FsdpConfig)" in done.stdout
