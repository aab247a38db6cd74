"""The tools and benchmarks run."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable
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


def wheel(folder: Path, name: str, module: str, table: str, names: Iterable[str]) -> Path:
    """A wheel with nothing in it but a table of environment variables."""
    file = folder / f"{name}-py3-none-any.whl"
    rows = "".join(f'    "{found}": lambda: None,\n' for found in names)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{module}/envs.py", f"{table}: dict[str, object] = {{\n{rows}}}\n")
    return file


def check_registry(cwd: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the tool in a folder, which is where it writes."""
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "check_env_registry.py", *arguments],
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_registry_is_compared_with_a_wheel(tmp_path: Path) -> None:
    """A wheel that holds what the registry says passes, one that contradicts it is named."""
    shipped = json.loads(
        (ROOT / "packages/device-env/src/device_env/data/names/vllm.json").read_text()
    )
    index = shipped["versions"].index("0.23.0")
    names = {name for name, read in shipped["names"].items() if read[index] == "1"}
    right = wheel(tmp_path, "vllm-0.23.0+cpu", "vllm", "environment_variables", sorted(names))
    done = check_registry(tmp_path, right)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"vllm 0.23.0+cpu: {len(names)} names, ")
    assert done.stdout.endswith("0 contradictions\n")
    odd = names - {"VLLM_LOGGING_LEVEL"} | {"VLLM_USE_V1"}
    wrong = wheel(tmp_path, "vllm-0.23.0", "vllm", "environment_variables", sorted(odd))
    done = check_registry(tmp_path, right, wrong)
    assert done.returncode == 1
    assert done.stdout.splitlines()[2:] == [
        "  VLLM_LOGGING_LEVEL: the registry says read, the wheel says not read",
        "  VLLM_USE_V1: the registry says not read, the wheel says read",
    ]


def test_the_names_of_a_wheel_are_kept(tmp_path: Path) -> None:
    """With --write versions are added in order, each name with one character per version."""
    data = tmp_path / "packages" / "device-env" / "src" / "device_env" / "data"
    data.mkdir(parents=True)
    table = ("vllm_ascend", "env_variables")
    newer = wheel(tmp_path, "vllm_ascend-0.99.0", *table, ["VLLM_ASCEND_A", "VLLM_ASCEND_B"])
    older = wheel(tmp_path, "vllm_ascend-0.98.0", *table, ["VLLM_ASCEND_B", "VLLM_ASCEND_C"])
    assert check_registry(tmp_path, newer, older, "--write").returncode == 0
    kept = json.loads((data / "names" / "vllm-ascend.json").read_text())
    assert kept["versions"] == ["0.98.0", "0.99.0"]
    assert kept["names"] == {"VLLM_ASCEND_A": "01", "VLLM_ASCEND_B": "11", "VLLM_ASCEND_C": "10"}


def test_a_wheel_of_another_kind_is_refused(tmp_path: Path) -> None:
    """A distribution without a known table, or a wheel without its table, is named."""
    other = wheel(tmp_path, "torch-2.13.0", "torch", "x", [])
    done = check_registry(tmp_path, other)
    assert done.returncode == 2
    assert "expected a wheel of vllm or vllm-ascend, got torch 2.13.0" in done.stderr
    empty = wheel(tmp_path, "vllm-0.23.0", "vllm", "something_else", ["VLLM_A"])
    done = check_registry(tmp_path, empty)
    assert done.returncode == 2
    assert "expected a dictionary environment_variables in envs.py, found none" in done.stderr
