"""Every engine shows the behaviour that `rl_contracts` asks of an engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_contracts.testing import ENGINE_CHECKS

TIMEOUT_S = 600


@pytest.fixture(scope="module", params=["fsdp", "veomni"])
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What each check said of one engine."""
    results = tmp_path_factory.mktemp(request.param) / "results.json"
    script = Path(__file__).with_name("engine_process.py")
    done = subprocess.run(
        [sys.executable, script, request.param, results],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(results.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("check", [check.__name__ for check in ENGINE_CHECKS])
def test_engine(outcomes: dict[str, str], check: str) -> None:
    """The engine passes the check that the parameter names."""
    assert outcomes[check] == "passed"
