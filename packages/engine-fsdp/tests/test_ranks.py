"""One rank, two shards and two replicas over gloo: the same numbers, and errors on all ranks."""

import re
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
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

WORKER = Path(__file__).with_name("worker.py")

pytestmark = pytest.mark.slow

WORLDS = {"one": (1, 1), "shards": (2, 1), "replicas": (2, 2)}
"""Name to ranks and copies of the model."""


@dataclass(frozen=True)
class World:
    """What a run left: tensors and texts of each rank, dense and with experts."""

    folder: Path
    tensors: list[dict[str, Tensor]]
    texts: list[dict[str, str]]
    expert_tensors: list[dict[str, Tensor]]
    expert_texts: list[dict[str, str]]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    """Run the worker in all worlds at once."""
    root = tmp_path_factory.mktemp("worlds")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 37,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    dense = Qwen3Config(**sizes, tie_word_embeddings=True)
    experts = Qwen3MoeConfig(
        **sizes, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24
    )
    dense_class: Any = Qwen3ForCausalLM
    experts_class: Any = Qwen3MoeForCausalLM
    dense_class(dense).save_pretrained(root / "model")
    experts_class(experts).save_pretrained(root / "experts")
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
                *("--experts-model", str(root / "experts")),
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
    return World(
        folder,
        *_read([folder / f"rank{rank}.safetensors" for rank in range(world_size)]),
        *_read([folder / f"experts-rank{rank}.safetensors" for rank in range(world_size)]),
    )


def _read(files: list[Path]) -> tuple[list[dict[str, Tensor]], list[dict[str, str]]]:
    tensors, texts = [], []
    for file in files:
        tensors.append(load_file(file))
        with safe_open(file, framework="pt") as opened:
            texts.append(opened.metadata())
    return tensors, texts


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


def test_a_malformed_batch_on_one_rank_is_refused_on_all(worlds: dict[str, World]) -> None:
    """Both ranks name the rank, the micro-batch and what is wrong with it (A50's kind)."""
    first, second = (texts["malformed"] for texts in worlds["shards"].texts)
    assert first == second
    assert re.search(
        r"forward_backward: on rank 1, micro-batch 0 \(trajectories row.*first token of a seq",
        first,
    )


def test_a_loss_that_is_not_finite_stops_all_ranks(worlds: dict[str, World]) -> None:
    """Both ranks name the rank that has it and its trajectories; no gradient is left."""
    first, second = (texts["not finite"] for texts in worlds["shards"].texts)
    assert first == second
    assert "at policy version 0 on rank 1, in micro-batch 0 (trajectories row" in first
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


@pytest.mark.parametrize("name", ["shards", "replicas"])
def test_experts_have_the_gradient_of_one_rank(worlds: dict[str, World], name: str) -> None:
    """Five experts over two ranks: gradient, its norm and the weights after a step are equal."""
    expected = worlds["one"].expert_tensors[0]
    assert "grad.model.layers.1.mlp.experts.gate_up_proj" in expected
    assert "after.model.layers.1.mlp.experts.4.up_proj.weight" in expected
    for got in worlds[name].expert_tensors:
        assert got.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(got[key], tensor, atol=1e-6, rtol=1e-4, msg=key)


@pytest.mark.parametrize("name", list(WORLDS))
def test_experts_travel_under_the_names_of_the_folder(worlds: dict[str, World], name: str) -> None:
    """Exported before a step, they are the folder's bits; saved, the exported ones (A42)."""
    world = worlds[name]
    stored = load_file(world.folder.parent / "experts" / "model.safetensors")
    saved = load_file(world.folder / "experts-pretrained" / "model.safetensors")
    for tensors in world.expert_tensors:
        before = {
            key.removeprefix("before."): value
            for key, value in tensors.items()
            if key.startswith("before.")
        }
        assert before.keys() == stored.keys() == saved.keys()
        for key, weight in stored.items():
            assert torch.equal(before[key], weight), key
            assert torch.equal(tensors[f"after.{key}"], saved[key]), key
    assert [texts["differ after loading"] for texts in world.expert_texts] == [""] * len(
        world.expert_texts
    )


@pytest.mark.parametrize("name", ["shards", "replicas"])
def test_a_folder_that_one_rank_cannot_write_is_an_error_on_all(
    worlds: dict[str, World], name: str
) -> None:
    """The rank with the full disk has its own error, the other one that names it (A49)."""
    first, second = worlds[name].expert_texts
    assert first["broken"] == "rank 1 failed: OSError: [Errno 28] No space left on device"
    assert second["broken"] == "[Errno 28] No space left on device"
    assert first["broken exists"] == second["broken exists"] == "False"
