"""The checks of `ray_replicas_process.py`: real Ray, two real samplers on the CPU."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

PROCESS = Path(__file__).with_name("ray_replicas_process.py")


@pytest.mark.slow
def test_two_samplers_in_actors(tmp_path: Path) -> None:
    """Requests are spread, and survive the death of an actor and of an engine."""
    pytest.importorskip("ray", reason="the handle of an actor is the caller's; the tests use Ray's")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        # the only way to loopback, and no environment built by uv for the workers (ray 2.60)
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        # otherwise ray writes a lasting token into the home folder
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    command = [sys.executable, str(PROCESS), str(tmp_path)]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=900, env=environment
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("ok ", "FAILED "))]
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    assert len(lines) == 6  # nothing was left out
