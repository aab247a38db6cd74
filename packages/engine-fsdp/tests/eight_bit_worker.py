"""Moments in 8 bits on two ranks, and their checkpoint on one; started by test_eight_bit.py."""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from safetensors.torch import save_file
from worker import loss_fn, trajectories, whole

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig
from parallel_state import ParallelState
from rl_contracts.packing import pack


def run(model: Path, out: Path, *, loads: bool) -> None:
    """Two steps and a checkpoint, or that checkpoint; what there is then, and after a step."""
    world_size = dist.get_world_size()
    config = FsdpConfig(
        model_path=str(model),
        optim=OptimConfig(learning_rate=0.01, max_grad_norm=0.05),
        compute_dtype="float32",
        eight_bit_moments=True,
        parallel=ParallelState(dp_size=world_size),
    )
    batches = pack(
        trajectories(), [1.0, -2.0, 0.5, 3.0, -1.0], max_tokens=12, num_ranks=world_size
    )[dist.get_rank()]
    with torch.compiler.set_stance("force_eager"):
        engine = FsdpEngine(config, device=torch.device("cpu"))
        if loads:
            engine.load_checkpoint(out / "checkpoint")
        for _ in range(0 if loads else 2):
            engine.forward_backward(batches, loss_fn)
            engine.optim_step()
        if not loads and world_size > 1:
            engine.save_checkpoint(out / "checkpoint")
        state = {name: whole(tensor) for name, tensor in engine._optimizer.state().items()}
        engine.forward_backward(batches, loss_fn)
        engine.optim_step()
    weights = {f"weight.{name}": tensor for name, tensor in engine.export_weights()}
    if dist.get_rank() == 0:
        kind = "loaded" if loads else f"on-{world_size}"
        save_file({**state, **weights}, out / f"{kind}.safetensors")


def main() -> None:
    """Two ranks, one that goes on, and one from the beginning."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--out"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    for world_size, loads in ((2, False), (1, True), (1, False)):
        meet = arguments.out / f"meet-{world_size}-{loads}"
        run_ranks(world_size, meet, partial(run, arguments.model, arguments.out, loads=loads))


if __name__ == "__main__":
    main()
