"""Starts what the tests on real gloo ranks run in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path


def run_reference(script: Path, action: str, folder: Path, *, timeout_s: float) -> None:
    """Plain transformers, where VeOmni never comes."""
    subprocess.run([sys.executable, script, action, folder], check=True, timeout=timeout_s)


def run_ranks(
    script: Path, scenario: str, world_size: int, folder: Path, *, timeout_s: float
) -> None:
    """Run one scenario; if a rank fails or hangs, stop the others and show what they wrote."""
    outputs = [folder / f"{scenario}-{rank}.log" for rank in range(world_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    if not scenario.startswith("cuda"):
        environment["CUDA_VISIBLE_DEVICES"] = ""  # VeOmni would build its models there
    ranks: list[subprocess.Popen[bytes]] = []
    for index, output in enumerate(outputs):
        with output.open("w") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, script, scenario, str(index), str(world_size), folder],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**environment, "LOCAL_RANK": str(index)},
                )
            )
    try:
        statuses = [rank.wait(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    logs = "\n".join(f"--- {output.name}\n{output.read_text()[-4000:]}" for output in outputs)
    assert statuses == [0] * world_size, logs
