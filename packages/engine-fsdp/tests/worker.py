"""One rank of the runs that test_ranks.py compares; started as a script."""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig
from parallel_state import ParallelState
from parallel_state.process_group import init_process_group
from rl_contracts.packing import pack
from rl_contracts.rollout import PolicyVersion, Trajectory
from rl_contracts.shared_folder import new_folder
from rl_contracts.train import LossOutput, PackedBatch

LENGTHS = (9, 2, 7, 4, 5)
"""Tokens of each trajectory, of which the first is the prompt."""

NUM_SCORED = sum(LENGTHS) - len(LENGTHS)


def trajectories() -> list[Trajectory]:
    """Fixed token ids; each rank makes the same."""
    return [
        Trajectory(
            trajectory_id=f"row{index}",
            group_id="group",
            token_ids=tuple((11 * index + 7 * place) % 37 for place in range(length)),
            loss_mask=tuple(place > 0 for place in range(length)),
            rollout_logprobs=tuple(-1.0 if place else 0.0 for place in range(length)),
            oldest_version=PolicyVersion(0),
            newest_version=PolicyVersion(0),
        )
        for index, length in enumerate(LENGTHS)
    ]


def loss_fn(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
    """Token-mean policy gradient, divided by the global number of tokens."""
    per_token = batch.advantages.repeat_interleave(batch.cu_seqlens.diff())
    scored = batch.loss_mask
    loss = -(policy_logprobs * per_token)[scored].sum() / NUM_SCORED
    return LossOutput(loss=loss, metrics={"tokens": scored.sum() / NUM_SCORED})


def not_finite_on_last_rank(
    policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch
) -> LossOutput:
    """The loss of a batch with a bad reward, on one rank only."""
    output = loss_fn(policy_logprobs, batch)
    scale = float("nan") if dist.get_rank() == dist.get_world_size() - 1 else 1.0
    return LossOutput(loss=output.loss * scale, metrics=output.metrics)


def message_of(kind: type[Exception], call: Callable[[], object]) -> str:
    """Text of the error that the call must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind.__name__}, nothing was raised")


def whole(tensor: Tensor) -> Tensor:
    """The tensor over all ranks."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def run(rank: int, world_size: int, replicas: int, model: Path, out: Path) -> None:
    """Everything that one world shows, into ``out``."""
    config = FsdpConfig(
        model_path=str(model),
        optim=OptimConfig(learning_rate=0.01, max_grad_norm=0.05, warmup_steps=3),
        compute_dtype="float32",
        parallel=ParallelState(dp_size=world_size, dp_replicate_size=replicas),
    )
    device = torch.device("cpu")
    engine = FsdpEngine(config, device=device)
    advantages = [1.0, -2.0, 0.5, 3.0, -1.0]
    batches = pack(trajectories(), advantages, max_tokens=12, num_ranks=world_size)[rank]
    texts: dict[str, str] = {}

    for index, logprobs in enumerate(engine.logprobs(batches)):
        for name, row in zip(
            batches[index].trajectory_ids,
            logprobs.split(batches[index].cu_seqlens.diff().tolist()),
            strict=True,
        ):
            save_file({"row": row.clone()}, out / f"logprobs-{name}.safetensors")

    uneven = batches if rank == 0 else batches[:-1]
    if world_size > 1:
        texts["uneven"] = message_of(ValueError, lambda: engine.forward_backward(uneven, loss_fn))
        whole_mask = torch.ones_like(batches[0].loss_mask)
        bad = [replace(batches[0], loss_mask=whole_mask), *batches[1:]] if rank == 1 else batches
        texts["malformed"] = message_of(ValueError, lambda: engine.forward_backward(bad, loss_fn))
    texts["not finite"] = message_of(
        FloatingPointError, lambda: engine.forward_backward(batches, not_finite_on_last_rank)
    )
    texts["no gradient"] = message_of(RuntimeError, engine.optim_step)

    metrics = engine.forward_backward(batches, loss_fn)
    gradients = {
        name: whole(parameter.grad)
        for name, parameter in engine._parameters.items()
        if parameter.grad is not None
    }
    grad_norm = engine.optim_step().grad_norm
    engine.logprobs(batches)  # leaves no gathered weight behind that the next step would not reach
    engine.save_checkpoint(out / "checkpoint")
    texts["exists"] = message_of(
        FileExistsError, lambda: engine.save_checkpoint(out / "checkpoint")
    )

    def go_on(trained: FsdpEngine) -> dict[str, Tensor]:
        for _ in range(2):
            trained.forward_backward(batches, loss_fn)
            trained.optim_step()
        noise = torch.rand(3)
        return {
            **dict(trained.export_weights()),
            "version": torch.tensor([trained.policy_version]),
        } | {"noise": noise}

    straight = go_on(engine)
    torch.manual_seed(1234 + rank)
    resumed_engine = FsdpEngine(config, device=device)
    resumed_engine.load_checkpoint(out / "checkpoint")
    resumed = go_on(resumed_engine)
    engine.save_pretrained(out / "pretrained")
    differing = [
        name for name, tensor in straight.items() if not torch.equal(tensor, resumed[name])
    ]
    texts["differ after resume"] = ", ".join(differing)

    save_file(
        {
            **{f"grad.{name}": gradient for name, gradient in gradients.items()},
            **{f"after.{name}": tensor for name, tensor in straight.items()},
            **{f"metric.{name}": torch.tensor([value]) for name, value in metrics.items()},
            "grad_norm": torch.tensor([grad_norm]),
        },
        out / f"rank{rank}.safetensors",
        metadata=texts,
    )


def run_experts(rank: int, world_size: int, replicas: int, model: Path, out: Path) -> None:
    """One step of a mixture of experts, its checkpoint, and a folder that a rank cannot write."""
    config = FsdpConfig(
        model_path=str(model),
        optim=OptimConfig(learning_rate=0.1, eps=1.0, max_grad_norm=None),
        compute_dtype="float32",
        parallel=ParallelState(dp_size=world_size, dp_replicate_size=replicas),
    )
    engine = FsdpEngine(config, device=torch.device("cpu"))
    advantages = [1.0, -2.0, 0.5, 3.0, -1.0]
    batches = pack(trajectories(), advantages, max_tokens=12, num_ranks=world_size)[rank]
    before = {f"before.{name}": tensor for name, tensor in engine.export_weights()}
    engine.forward_backward(batches, loss_fn)
    gradients = {
        f"grad.{name}": whole(parameter.grad)
        for name, parameter in engine._parameters.items()
        if parameter.grad is not None
    }
    grad_norm = torch.tensor([engine.optim_step().grad_norm])
    after = dict(engine.export_weights())
    engine.save_checkpoint(out / "experts-checkpoint")
    resumed = FsdpEngine(config, device=torch.device("cpu"))
    resumed.load_checkpoint(out / "experts-checkpoint")
    loaded = dict(resumed.export_weights())
    texts = {
        "differ after loading": ", ".join(
            name for name, tensor in after.items() if not torch.equal(tensor, loaded[name])
        )
    }
    resumed.save_pretrained(out / "experts-pretrained")

    def fail_on_last_rank() -> None:
        with new_folder(out / "broken"):
            if rank == world_size - 1:
                raise OSError(28, "No space left on device")

    texts["broken"] = message_of(
        OSError if rank == world_size - 1 else RuntimeError, fail_on_last_rank
    )
    texts["broken exists"] = str((out / "broken").exists())
    save_file(
        {
            **before,
            **gradients,
            **{f"after.{name}": tensor for name, tensor in after.items()},
            "grad_norm": grad_norm,
        },
        out / f"experts-rank{rank}.safetensors",
        metadata=texts,
    )


def main() -> None:
    """Read the arguments, run, and leave the group together."""
    parser = argparse.ArgumentParser()
    for name in ("--rank", "--world-size", "--replicas"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--model", "--experts-model", "--out"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    init_process_group(
        rank=arguments.rank,
        world_size=arguments.world_size,
        init_method=f"file://{os.fspath(arguments.out)}/meet",
        timeout_s=60.0,
    )
    sizes = (arguments.rank, arguments.world_size, arguments.replicas)
    run(*sizes, arguments.model, arguments.out)
    run_experts(*sizes, arguments.experts_model, arguments.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
