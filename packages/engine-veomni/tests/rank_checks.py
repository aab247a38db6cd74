"""What scenarios share: an engine on this rank, comparisons, and how a process runs them."""

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from scenario_data import EPS, LEARNING_RATE, TEMPERATURE, batches_of, loss_fn, read_folder
from torch import Tensor

from engine_veomni import OptimConfig, VeomniConfig, VeomniEngine, VeomniScorer
from parallel_state import ExtraParallelSizes, ParallelState
from parallel_state.process_group import init_process_group
from rl_contracts.train import PackedBatch

RANK = int(sys.argv[2])
ON_CUDA = sys.argv[1].startswith("cuda")
DEVICE = torch.device("cuda", RANK) if ON_CUDA else torch.device("cpu")
ATOL = 5e-5 if ON_CUDA else 1e-5
"""Largest difference in float32, in nats: CUDA adds up in another order."""


def make_engine(
    folder: Path,
    *,
    ep: int,
    dp_replicate_size: int = 1,
    ulysses_size: int = 1,
    **changes: Any,  # noqa: ANN401
) -> VeomniEngine:
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "compute_dtype": "float32",
        "temperature": TEMPERATURE,
        "parallel": ParallelState(
            dp_size=dist.get_world_size() // ulysses_size,
            dp_replicate_size=dp_replicate_size,
            ulysses_size=ulysses_size,
            extra_parallel_sizes=ExtraParallelSizes.of(ep=ep),
        ),
        "optim": OptimConfig(
            learning_rate=LEARNING_RATE, eps=EPS, weight_decay=0.01, max_grad_norm=None
        ),
        **changes,
    }
    config = VeomniConfig(**settings)
    return VeomniEngine(config, device=DEVICE)


def exported(engine: VeomniEngine) -> dict[str, Tensor]:
    weights = list(engine.export_weights())
    found = dict(weights)
    assert len(found) == len(weights)
    return {name: tensor.cpu() for name, tensor in found.items()}


def assert_bit_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert found[name].is_contiguous(), name
        difference = (found[name] - tensor).abs().max().item()
        assert difference <= atol, f"{name} differs by {difference}"


def raised(kind: type[Exception], action: Callable[[], object]) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind.__name__}")


def check_logprobs(
    engine: VeomniEngine | VeomniScorer, folder: Path, batches: Sequence[PackedBatch]
) -> None:
    """Those of plain transformers, row by row."""
    reference = load_file(folder / "reference.safetensors")
    for given, logprobs in zip(batches, engine.logprobs(batches), strict=True):
        pieces = logprobs.cpu().split(given.cu_seqlens.diff().tolist())
        for name, piece in zip(given.trajectory_ids, pieces, strict=True):
            difference = (piece - reference[name]).abs().max().item()
            assert difference < ATOL, f"{name} differs by {difference} nats"


def check_against_reference(engine: VeomniEngine, folder: Path) -> None:
    """Logprobs, loss, gradient and one step are those of plain transformers on one process."""
    parallel = engine.config.parallel
    reference = load_file(folder / "reference.safetensors")
    assert_bit_equal(exported(engine), read_folder(folder / "model"))
    batches = batches_of(dist.get_rank() // parallel.ulysses_size, parallel.dp_size)
    check_logprobs(engine, folder, batches)
    metrics = engine.forward_backward(batches, loss_fn)
    assert abs(metrics["loss"] - reference["loss"].item()) < ATOL, metrics
    assert abs(metrics["tokens"] - 1.0) < 1e-6, metrics
    # a pass without gradient in between: weights that it left gathered would escape the step
    engine.logprobs(batches)
    step = engine.optim_step()
    assert step.policy_version == engine.policy_version == 1
    norm = reference["norm"].item()
    assert abs(step.grad_norm - norm) < ATOL * max(1.0, norm), (step.grad_norm, norm)
    assert_near(exported(engine), read_folder(folder / "stepped"), atol=ATOL / 10)


def main(scenarios: Mapping[str, Any], *, timeout_s: float) -> None:
    """Run the scenario of the command line; hard-exits after a barrier, see `engine_process`."""
    name, world_size, folder = sys.argv[1], int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    if ON_CUDA:
        torch.cuda.set_device(DEVICE)
    init_process_group(
        rank=RANK,
        world_size=world_size,
        init_method=f"file://{folder}/{name}.store",
        backend="nccl" if ON_CUDA else "gloo",
        timeout_s=timeout_s,
    )
    status = 1
    try:
        scenarios[name](Path(folder))
        dist.barrier()
        status = 0
    except BaseException:  # noqa: BLE001 - the border of the process: shown, and told by its status
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
