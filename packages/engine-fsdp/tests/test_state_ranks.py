"""Checkpoints, watchdogs and optimizers over several ranks."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

WORKER = Path(__file__).with_name("state_worker.py")

STAGES = (1, 2, 3, 4)
"""1 -> 2 -> 4 ranks -> 2 copies of 2 shards -> 1 rank."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all worlds; their files."""
    root = tmp_path_factory.mktemp("state")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 37,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }
    config = Qwen3MoeConfig(**sizes)
    model_class: Any = Qwen3MoeForCausalLM
    model_class(config).save_pretrained(root / "model")
    command = [sys.executable, "-W", "error", str(WORKER), "--model", str(root / "model")]
    process = subprocess.Popen(
        [*command, "--out", str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its ranks, which are forks, end with it
    )
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output
    return root


@pytest.mark.parametrize("stage", STAGES)
def test_weights_and_moments_are_the_same_bits_on_other_ranks(out: Path, stage: int) -> None:
    """What is loaded is what was saved, though the next steps went on while it was written; the
    rows of 37 tokens and 5 experts divide over no number of ranks here.
    """
    saved = load_file(out / f"saved-{stage - 1}.safetensors")
    loaded = load_file(out / f"loaded-{stage}.safetensors")
    assert saved.keys() == loaded.keys()
    assert any(name.startswith("optim.exp_avg_sq.") and saved[name].any() for name in saved)
    assert [name for name in saved if not torch.equal(saved[name], loaded[name])] == []
    assert loaded["policy_version"].item() == stage


def test_other_ranks_draw_other_numbers(out: Path) -> None:
    """On another number of ranks each begins from a seed of its own, the same at every load."""
    draws = [load_file(out / f"noise-2-{rank}.safetensors") for rank in range(4)]
    assert len({tuple(draw["0"].tolist()) for draw in draws}) == 4
    assert all(torch.equal(draw["0"], draw["1"]) for draw in draws)


def test_a_loss_function_that_raises_on_one_rank_stops_all(out: Path) -> None:
    """The rank has its own error, the other one the rank, the micro-batch and the text; neither
    waits in a collective, no gradient is left, and both go on together.
    """
    first, second = (json.loads((out / f"watch-{rank}.json").read_text()) for rank in range(2))
    assert int(second["micro-batches"]) > 1
    assert first["calls"] == first["micro-batches"]
    assert second["calls"] == "1"
    assert second["raised"] == "'no reward'"
    assert re.fullmatch(
        r"forward_backward: the loss function failed on rank 1, in micro-batch 0 \(trajectories "
        r"row\d.*\): KeyError: 'no reward'; the gradient was dropped",
        first["raised"],
    )
    assert "there is no gradient" in first["no gradient"]
    assert "there is no gradient" in second["no gradient"]


def test_a_rank_that_does_not_come_is_named(out: Path) -> None:
    """The one that waits says for whom, how long, and in which call."""
    text = json.loads((out / "watch-0.json").read_text())["missing"]
    assert "logprobs: rank 0, at policy version 1, waited up to 3.0 s for the ranks named" in text
    assert re.search(r"ranks? 1\b", text, re.IGNORECASE)


@pytest.mark.parametrize("ranks", ["2-1", "2-2"])
def test_adapters_are_trained_alike_on_two_ranks(out: Path, ranks: str) -> None:
    """Shards and copies have the gradient norms and the merged weights of one rank (A38)."""
    pytest.importorskip("peft")
    expected = load_file(out / "lora-1-1.safetensors")
    got = load_file(out / f"lora-{ranks}.safetensors")
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("ranks", ["2-1", "2-2"])
def test_muon_makes_whole_matrices_orthogonal(out: Path, ranks: str) -> None:
    """On shards and copies it steps as on one rank, up to the bfloat16 that it computes in: a step
    of each shard by itself would be another one altogether. The gradient of a model has the norm
    of one rank.
    """
    expected = load_file(out / "muon-step-1-1.safetensors")
    got = load_file(out / f"muon-step-{ranks}.safetensors")
    for name, step in expected.items():
        assert (got[name] - step).norm() < 0.05 * step.norm(), name
    norms = [load_file(out / f"muon-{each}.safetensors")["norms"][0] for each in ("1-1", ranks)]
    torch.testing.assert_close(norms[1], norms[0], atol=0.0, rtol=1e-5)


@pytest.mark.parametrize("ranks", ["1-1", "2-1", "2-2"])
def test_two_deterministic_runs_are_the_same(out: Path, ranks: str) -> None:
    """Bit for bit, weights and gradient norms."""
    first = load_file(out / f"deterministic-{ranks}.safetensors")
    second = load_file(out / f"again-{ranks}.safetensors")
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
