"""Runs functions of `ranks/` on real gloo ranks."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RANKS = Path(__file__).parent / "ranks"
TIMEOUT_S = 240

RunRanks = Callable[[str, int, list[str]], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """`run_ranks("meshes", 4, ["replicas"])[0]["replicas"]`: what rank 0 of 4 returned."""

    def run(file: str, world_size: int, functions: list[str]) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(file)
        script = RANKS / f"{file}.py"
        launch = [sys.executable, str(RANKS / "launch.py"), str(world_size)]
        command = [*launch, str(folder), str(script), *functions]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # glibc: freed tensors go back to the kernel at once, so that its count is the truth
            "MALLOC_MMAP_THRESHOLD_": "65536",
        }
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=TIMEOUT_S)
            finally:
                # whoever is left in the launcher's own session: its ranks
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, output
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]

    return run
