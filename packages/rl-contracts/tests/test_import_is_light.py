"""Importing the package in a fresh process loads no heavy library."""

import subprocess
import sys


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_import_loads_no_torch() -> None:
    """`import rl_contracts` is for programs without torch; the training half is not."""
    assert "torch" not in loaded_after("import rl_contracts")
    assert "torch" in loaded_after("import rl_contracts.train")
