"""What the type checkers say, line by line.

Every line of `must_fail.py` that carries an N number is a mistake that users made or could make.
N25, an axis that an un-annotated custom literal does not have, is the hole that is known.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import parallel_state

SAMPLES = Path(__file__).parent / "typing_samples"
SOURCE = Path(parallel_state.__file__).parents[1]

NUMBERED = {
    number: line
    for line, text in enumerate((SAMPLES / "must_fail.py").read_text().splitlines(), start=1)
    for number in re.findall(r"# (N\d\d)\b", text)
}
ALL = {f"N{number:02}" for number in (*range(1, 18), *range(21, 27))}


def _mypy(name: str, tmp_path: Path) -> set[int]:
    """Lines of the sample that mypy calls errors, with no configuration but --strict."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", name],
        cwd=SAMPLES,
        env={**os.environ, "MYPYPATH": str(SOURCE), "MYPY_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    errors = re.findall(r"^(\S+?):(\d+): error:", done.stdout, flags=re.MULTILINE)
    assert {file for file, _ in errors} <= {name}, done.stdout
    assert "Found" in done.stdout or "Success" in done.stdout
    return {int(line) for _, line in errors}


def _pyright(name: str) -> set[int]:
    """Lines of the sample that basedpyright calls errors."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "basedpyright",
            "--outputjson",
            "--pythonpath",
            sys.executable,
            name,
        ],
        cwd=SAMPLES,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    return {
        diagnostic["range"]["start"]["line"] + 1
        for diagnostic in report["generalDiagnostics"]
        if diagnostic["severity"] == "error"
    }


def test_the_samples_are_all_there() -> None:
    """No number was lost on the way."""
    assert NUMBERED.keys() == ALL


def test_mypy_accepts_what_must_pass(tmp_path: Path) -> None:
    """No error under --strict."""
    assert _mypy("must_pass.py", tmp_path) == set()


def test_mypy_refuses_what_must_fail(tmp_path: Path) -> None:
    """Exactly the numbered lines are errors, all but N25."""
    expected = {line for number, line in NUMBERED.items() if number != "N25"}
    assert _mypy("must_fail.py", tmp_path) == expected


def test_pyright_accepts_what_must_pass() -> None:
    """No error."""
    assert _pyright("must_pass.py") == set()


def test_pyright_refuses_what_must_fail() -> None:
    """Exactly the numbered lines, all but N25 and `attrs.evolve`, whose arguments it cannot see."""
    expected = {line for number, line in NUMBERED.items() if number not in {"N14", "N15", "N25"}}
    assert _pyright("must_fail.py") == expected
