"""The mixture-of-experts example: expert parallelism over two ranks, end to end."""

import subprocess
import sys
from pathlib import Path

import pytest

from rl_metrics import read_metrics

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_moe.py"


@pytest.mark.slow
def test_experts_learn_and_sampler_and_trainer_agree(tmp_path: Path) -> None:
    """Two ranks that each hold half of the experts learn to sort; logprobs agree to 1e-4 nats.

    In turn (`--sync`), so that every batch was sampled from the very weights that it meets in the
    trainer: a weight that was transferred wrongly would show as nats, not as 1e-4.
    """
    done = subprocess.run(
        [
            sys.executable,
            EXAMPLE,
            *("--sync", f"run.folder={tmp_path}", "loop.num_steps=20", "loop.evaluate_every=10"),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    records = read_metrics(folder / "metrics.jsonl")
    rewards = [
        record.values["reward/heldout/mean"]
        for record in records
        if "reward/heldout/mean" in record.values
    ]
    assert rewards[-1] > rewards[0] + 0.2
    for record in records[1:]:
        assert record.values["mismatch/logprob/mean"] < 1e-4
        assert record.values["staleness/trajectory/max"] == 0
    effective = (folder / "effective_config.toml").read_text(encoding="utf-8")
    assert "extra_parallel_sizes = { ep = 2 }  # default; read by parallel_state" in effective
    assert (folder / "model" / "model.safetensors").is_file()
