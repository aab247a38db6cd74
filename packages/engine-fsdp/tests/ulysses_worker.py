"""Worlds whose ranks share sequences, one after the other; test_ulysses.py compares them."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig
from parallel_state import ParallelState
from rl_contracts.packing import pack
from rl_contracts.rollout import PolicyVersion, Trajectory
from rl_contracts.train import LossOutput, PackedBatch

WORLDS = {"1": (1, 1), "2": (1, 2), "4": (1, 4), "2x2": (2, 2)}
"""Name to ranks with different data and ranks that share a sequence."""

LENGTHS = (9, 2, 7, 4, 5, 12)
"""Tokens of each trajectory: 39 in all, which divide over no number of ranks here."""

NUM_SCORED = sum(LENGTHS) - 2 * len(LENGTHS)


def trajectories() -> list[Trajectory]:
    """Fixed token ids; the first two of each are the prompt."""
    return [
        Trajectory(
            trajectory_id=f"row{index}",
            group_id="group",
            token_ids=tuple((11 * index + 7 * place) % 37 for place in range(length)),
            loss_mask=tuple(place > 1 for place in range(length)),
            rollout_logprobs=(-1.0,) * length,
            oldest_version=PolicyVersion(0),
            newest_version=PolicyVersion(0),
        )
        for index, length in enumerate(LENGTHS)
    ]


def loss_fn(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
    """A loss that mixes the tokens of a sequence, so that slices must meet."""
    sums = torch.stack(
        [row.sum() for row in policy_logprobs.split(batch.cu_seqlens.diff().tolist())]
    )
    loss = -(torch.tanh(0.1 * sums) * batch.advantages).sum()
    return LossOutput(loss=loss, metrics={"tokens": batch.loss_mask.sum() / NUM_SCORED})


def message_of(call: Callable[[], object]) -> str:
    """Text of the ValueError that the call must raise."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("expected a ValueError, nothing was raised")


def run(model: Path, out: Path, dp_size: int, ulysses_size: int) -> None:
    """All that one world shows."""
    engine = FsdpEngine(
        FsdpConfig(
            model_path=str(model),
            optim=OptimConfig(learning_rate=0.01, max_grad_norm=None),
            compute_dtype="float32",
            activation_checkpointing="full",
            parallel=ParallelState(dp_size=dp_size, ulysses_size=ulysses_size),
        ),
        device=torch.device("cpu"),
    )
    rank = dist.get_rank()
    advantages = [1.0, -2.0, 0.5, 3.0, -1.0, 1.5]
    shares = pack(trajectories(), advantages, max_tokens=21, num_ranks=dp_size)
    batches = shares[rank // ulysses_size]
    texts = {}
    if ulysses_size > 1:
        changed = replace(batches[0], token_ids=(batches[0].token_ids + 1) % 37)
        others = batches if rank % ulysses_size == 0 else [changed, *batches[1:]]
        texts["others"] = message_of(lambda: engine.logprobs(others))
    tensors: dict[str, Tensor] = {}
    found = engine.token_statistics(batches)
    for batch, statistics in zip(batches, found, strict=True):
        lengths = batch.cu_seqlens.diff().tolist()
        for name, logprobs, entropies in zip(
            batch.trajectory_ids,
            statistics.logprobs.split(lengths),
            statistics.entropies.split(lengths),
            strict=True,
        ):
            tensors[f"logprobs.{name}"] = logprobs.clone()
            tensors[f"entropies.{name}"] = entropies.clone()
    metrics = engine.forward_backward(batches, loss_fn)
    for name, parameter in engine._model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        tensors[f"grad.{name}"] = parameter.grad.full_tensor().clone()
    tensors["grad_norm"] = torch.tensor(engine.optim_step().grad_norm)
    tensors.update({f"metric.{name}": torch.tensor(value) for name, value in metrics.items()})
    save_file(tensors, out / f"rank{rank}.safetensors", metadata=texts)


def main() -> None:
    """Run every world."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--out"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    for name, (dp_size, ulysses_size) in WORLDS.items():
        folder = arguments.out / name
        folder.mkdir()
        work = partial(run, arguments.model, folder, dp_size, ulysses_size)
        run_ranks(dp_size * ulysses_size, folder / "meet", work)


if __name__ == "__main__":
    main()
