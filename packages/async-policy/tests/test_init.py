"""What importing the package costs."""

import subprocess
import sys

import async_policy


def test_import_loads_no_vendor() -> None:
    """A fresh process that imports the package has neither torch, ray nor vllm."""
    script = (
        "import sys, async_policy; print([m for m in ('torch', 'ray', 'vllm') if m in sys.modules])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    assert finished.stdout == "[]\n"


def test_public_names_are_sorted_and_there() -> None:
    """`__all__` is sorted, and every name in it exists."""
    assert async_policy.__all__ == sorted(async_policy.__all__)
    assert all(hasattr(async_policy, name) for name in async_policy.__all__)
