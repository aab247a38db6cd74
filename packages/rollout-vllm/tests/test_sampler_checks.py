"""The checks of `sampler_process.py` on every device and in every way to spread an engine."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollout_vllm.versions import installed_version

GPUS = torch.cuda.device_count()
PROCESS = Path(__file__).with_name("sampler_process.py")


def check(mode: str, dtype: str, folder: Path) -> None:
    """Every check of the process passes; what failed stands in the assertion."""
    command = [sys.executable, str(PROCESS), mode, dtype, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("ok ", "FAILED "))]
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    assert len(lines) >= 11  # nothing was left out


@pytest.mark.slow
def test_sampler_on_the_cpu(tmp_path: Path) -> None:
    """Streams, deadlines, top_k, a thousand samples at once, an update in flight."""
    check("cpu", "float32", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cpu-guesses", "cpu-pp2", "cpu-yarn", "cpu-lora"])
def test_single_settings_on_the_cpu(tmp_path: Path, mode: str) -> None:
    """The same with guesses, in two stages, with another rotary embedding, and with adapters."""
    check(mode, "float32", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    not (installed_version() or "").startswith("0.30."),
    reason="the installed vLLM returns no experts on the CPU",
)
def test_routers_decisions_on_the_cpu(tmp_path: Path) -> None:
    """The experts of every token are those that transformers' router chooses."""
    check("cpu-routed-moe", "float32", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="no NVIDIA GPU on this host")
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("cuda", "bfloat16"),
        ("cuda-eager", "float32"),
        ("cuda-moe", "bfloat16"),
        ("cuda-lora", "bfloat16"),
    ],
)
def test_sampler_on_one_gpu(tmp_path: Path, mode: str, dtype: str) -> None:
    """The same with compiled graphs, without, with experts, and with adapters."""
    check(mode, dtype, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="fewer than two NVIDIA GPUs on this host")
@pytest.mark.parametrize("mode", ["cuda-tp2", "cuda-dp2", "cuda-ep2-moe"])
def test_sampler_on_two_gpus(tmp_path: Path, mode: str) -> None:
    """Layers, requests or experts are shared; no two samples of a prompt are the same."""
    check(mode, "bfloat16", tmp_path)
