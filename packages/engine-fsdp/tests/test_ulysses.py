"""Ranks that share their sequences, over gloo: the numbers of one rank."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

WORKER = Path(__file__).with_name("ulysses_worker.py")

WORLDS = {"2": 2, "4": 4, "2x2": 4}
"""Ranks of each world but that of one rank; the last has two shares of data."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all worlds; their files."""
    root = tmp_path_factory.mktemp("ulysses")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=37,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,  # fewer than four ranks
        head_dim=8,
    )
    model_class: Any = Qwen3ForCausalLM
    model_class(config).save_pretrained(root / "model")
    command = [sys.executable, "-W", "error", str(WORKER), "--model", str(root / "model")]
    run = subprocess.run(
        [*command, "--out", str(root)], check=False, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return root


def _of(out: Path, world: str, rank: int) -> dict[str, Tensor]:
    return load_file(out / world / f"rank{rank}.safetensors")


@pytest.mark.parametrize("world", list(WORLDS))
def test_shared_sequences_have_the_gradient_of_one_rank(out: Path, world: str) -> None:
    """Gradient, its norm, loss and metrics on every rank; each is counted once (A08, A38)."""
    expected = _of(out, "1", 0)
    compared = [name for name in expected if name.startswith(("grad", "metric."))]
    assert expected["metric.tokens"].item() == pytest.approx(1.0)
    assert "metric.loss" in compared
    for rank in range(WORLDS[world]):
        got = _of(out, world, rank)
        for name in compared:
            torch.testing.assert_close(got[name], expected[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("world", list(WORLDS))
def test_logprobs_do_not_depend_on_who_shares_them(out: Path, world: str) -> None:
    """Each rank has those of all tokens of its micro-batches, and the entropies."""
    expected = _of(out, "1", 0)
    seen = set()
    for rank in range(WORLDS[world]):
        got = _of(out, world, rank)
        names = {name for name in got if name.startswith(("logprobs.", "entropies."))}
        seen |= names
        for name in names:
            torch.testing.assert_close(got[name], expected[name], atol=1e-5, rtol=0.0, msg=name)
    assert seen == {name for name in expected if name.startswith(("logprobs.", "entropies."))}


@pytest.mark.parametrize("world", list(WORLDS))
def test_other_tokens_on_one_rank_are_refused_on_all(out: Path, world: str) -> None:
    """Ranks that should share their sequences and were given different ones say so; none hangs."""
    texts = set()
    for rank in range(WORLDS[world]):
        with safe_open(out / world / f"rank{rank}.safetensors", framework="pt") as opened:
            texts.add(opened.metadata()["others"])
    [text] = texts
    assert "share their sequences" in text
    assert "but rank 1 was given other micro-batches than rank 0" in text
