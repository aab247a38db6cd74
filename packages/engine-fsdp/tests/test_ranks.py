"""One rank, two shards and two replicas over gloo: the same numbers, and errors on all ranks."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

WORKER = Path(__file__).with_name("worker.py")

pytestmark = pytest.mark.slow

WORLDS = {"one": (1, 1), "shards": (2, 1), "replicas": (2, 2)}
"""Name to ranks and copies of the model."""


@dataclass(frozen=True)
class World:
    """What a run left: tensors and texts of each rank."""

    folder: Path
    tensors: list[dict[str, Tensor]]
    texts: list[dict[str, str]]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    """Run the worker in all worlds at once."""
    root = tmp_path_factory.mktemp("worlds")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=37,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model_class: Any = Qwen3ForCausalLM
    model_class(config).save_pretrained(root / "model")
    with ThreadPoolExecutor() as pool:
        runs = {name: pool.submit(_run, root, name, *sizes) for name, sizes in WORLDS.items()}
        return {name: run.result() for name, run in runs.items()}


def _run(root: Path, name: str, world_size: int, replicas: int) -> World:
    folder = root / name
    folder.mkdir()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "error", str(WORKER)),
                *("--rank", str(rank), "--world-size", str(world_size)),
                *("--replicas", str(replicas)),
                *("--model", str(root / "model"), "--out", str(folder)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    outputs = []
    try:
        outputs = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    tensors, texts = [], []
    for rank in range(world_size):
        file = folder / f"rank{rank}.safetensors"
        tensors.append(load_file(file))
        with safe_open(file, framework="pt") as opened:
            texts.append(opened.metadata())
    return World(folder, tensors, texts)


@pytest.mark.parametrize("name", ["shards", "replicas"])
def test_two_ranks_have_the_gradient_of_one(worlds: dict[str, World], name: str) -> None:
    """Gradient, its norm, loss and metrics are sums over ranks, not means (A07, A37, A38)."""
    expected = worlds["one"].tensors[0]
    compared = [key for key in expected if not key.startswith("after.")]
    assert any(key.startswith("grad.") for key in compared)
    for got in worlds[name].tensors:
        for key in compared:
            torch.testing.assert_close(got[key], expected[key], atol=1e-6, rtol=1e-4, msg=key)
    assert expected["metric.tokens"].item() == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["shards", "replicas"])
def test_three_steps_end_at_the_same_weights(worlds: dict[str, World], name: str) -> None:
    """After three clipped steps all ranks export equal weights, those of one rank."""
    expected = worlds["one"].tensors[0]
    first, second = worlds[name].tensors
    for key in (key for key in expected if key.startswith("after.") and key != "after.noise"):
        assert torch.equal(first[key], second[key]), key
        torch.testing.assert_close(first[key], expected[key], atol=1e-4, rtol=1e-3, msg=key)
    assert first["after.version"].item() == 3


@pytest.mark.parametrize("name", ["shards", "replicas"])
def test_logprobs_do_not_depend_on_the_ranks(worlds: dict[str, World], name: str) -> None:
    """Each trajectory's logprobs are those of one rank, wherever it was packed (A51)."""
    for index in range(5):
        file = f"logprobs-row{index}.safetensors"
        expected = load_file(worlds["one"].folder / file)["row"]
        got = load_file(worlds[name].folder / file)["row"]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0.0)
        assert expected[0] == 0.0
        assert (expected[1:] < 0.0).all()


def test_unequal_counts_are_refused_on_all_ranks(worlds: dict[str, World]) -> None:
    """Two micro-batches on one rank and one on the other: both say so, none waits (A50)."""
    for texts in worlds["shards"].texts:
        assert (
            "same number of micro-batches on every rank, at least one, got 2, 1"
            in (texts["uneven"])
        )


def test_a_loss_that_is_not_finite_stops_all_ranks(worlds: dict[str, World]) -> None:
    """The rank that has it names its trajectories, the other that rank; no gradient is left."""
    first, second = (texts["not finite"] for texts in worlds["shards"].texts)
    assert "not finite at policy version 0 in rank 1, which names the trajectories" in first
    assert "not finite at policy version 0 in micro-batch 0 (trajectories row" in second
    for texts in worlds["shards"].texts:
        assert "there is no gradient at policy version 0" in texts["no gradient"]


@pytest.mark.parametrize("name", list(WORLDS))
def test_resuming_is_not_having_stopped(worlds: dict[str, World], name: str) -> None:
    """Two steps after loading a checkpoint equal those without bit for bit; so do random draws."""
    for texts in worlds[name].texts:
        assert texts["differ after resume"] == ""
        assert "expected a new folder, but it exists" in texts["exists"]


@pytest.mark.parametrize("name", list(WORLDS))
def test_saved_folder_loads_in_transformers(worlds: dict[str, World], name: str) -> None:
    """The Hugging Face folder that two ranks wrote holds the exported weights, and still ties."""
    world = worlds[name]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        world.folder / "pretrained", output_loading_info=True
    )
    model, report = loaded
    assert not any(report.values())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for key, weight in model.named_parameters():
        assert torch.equal(weight, world.tensors[0][f"after.{key}"]), key
