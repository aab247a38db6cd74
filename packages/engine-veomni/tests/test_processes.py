"""The engine on real gloo ranks, compared with plain transformers in another process."""

import functools
from pathlib import Path

import pytest
import torch
import veomni_ranks
from safetensors.torch import load_file

HERE = Path(__file__).parent

TIMEOUT_S = 240.0
run_reference = functools.partial(
    veomni_ranks.run_reference, HERE / "reference_process.py", timeout_s=TIMEOUT_S
)
run_ranks = functools.partial(
    veomni_ranks.run_ranks, HERE / "engine_process.py", timeout_s=TIMEOUT_S
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("veomni")
    run_reference("make", folder)
    return folder


def test_one_rank_meets_the_contract(folder: Path) -> None:
    """All checks of `ENGINE_CHECKS` pass; mixture and dense model equal plain transformers."""
    run_ranks("contract", 1, folder)


def test_two_ranks_equal_plain_transformers(folder: Path) -> None:
    """EP 2 and EP 1 side by side: export, logprobs, gradient, step, resume, errors (A42, A38).

    The routers' choices can be replayed.

    The exported folder gives plain transformers, in a process of its own, the logprobs that the
    engine reported last.
    """
    run_ranks("two_ranks", 2, folder)
    run_reference("reload", folder)
    reloaded = load_file(folder / "reloaded.safetensors")
    wanted = torch.cat([reloaded["row-3"], reloaded["row-4"]])
    for rank in range(2):
        text = (folder / f"trained-{rank}.txt").read_text()
        found = torch.tensor([float(value) for value in text.split()])
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0.0)


def test_two_ranks_balance_and_replay(folder: Path) -> None:
    """The balancing loss is transformers', and a sampler's routes lower the mismatch KL."""
    run_ranks("two_ranks_routers", 2, folder)


def test_two_ranks_lend_their_memory(folder: Path) -> None:
    """Trips to host memory leave no trace in training; offload is refused where it does nothing."""
    run_ranks("two_ranks_memory", 2, folder)


def test_two_ranks_in_bfloat16(folder: Path) -> None:
    """In bfloat16 with activation checkpointing, weights are exported as they are computed with."""
    run_ranks("two_ranks_bfloat16", 2, folder)


def test_four_ranks_equal_plain_transformers(folder: Path) -> None:
    """Experts sharded within their rank, replicated (HSDP), and one pair per rank (A38)."""
    run_ranks("four_ranks", 4, folder)


def test_ranks_that_share_sequences_equal_plain_transformers(folder: Path) -> None:
    """Ulysses 2 and 4, with experts over all ranks, over half of them, and over none (A08, A38)."""
    run_ranks("ulysses", 4, folder)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_one_gpu_equals_plain_transformers(folder: Path) -> None:
    """The contract in float32, both expert kernels in bfloat16, and no CPU backend."""
    run_ranks("cuda", 1, folder)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here")
def test_two_gpus_equal_plain_transformers(folder: Path) -> None:
    """Over NCCL: experts spread, weights sharded, and the model replicated."""
    run_ranks("cuda_two_ranks", 2, folder)
