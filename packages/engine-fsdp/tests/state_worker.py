"""What ranks do in test_state_ranks.py, which starts this."""

import argparse
import importlib.util
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from worker import loss_fn, message_of, trajectories, whole

from engine_fsdp import FsdpConfig, FsdpEngine, LoraConfig, MuonConfig, OptimConfig
from engine_fsdp.optimizer import PolicyOptimizer
from parallel_state import ParallelState
from rl_contracts.packing import pack
from rl_contracts.train import LossOutput, PackedBatch

WORLDS = ((1, 1), (2, 1), (4, 1), (4, 2), (1, 1))
"""Ranks and copies of the model, one world after the other."""

ADVANTAGES = (1.0, -2.0, 0.5, 3.0, -1.0)


def dump(engine: FsdpEngine, file: Path) -> None:
    """Write the whole state, gathered; rank 0 does, all take part."""
    state: dict[str, Tensor] = {
        name: whole(tensor).contiguous()
        for name, tensor in engine._state.tensors(engine.policy_version).items()
    }
    if dist.get_rank() == 0:
        save_file(state, file)


def reshard(stage: int, world_size: int, replicas: int, model: Path, out: Path) -> None:
    """Load what the stage before saved, go one step, and save."""
    config = FsdpConfig(
        model_path=str(model),
        optim=OptimConfig(learning_rate=0.01),
        compute_dtype="float32",
        parallel=ParallelState(dp_size=world_size, dp_replicate_size=replicas),
    )
    engine = FsdpEngine(config, device=torch.device("cpu"))
    torch.manual_seed(100 * stage + dist.get_rank())
    if stage:
        noise: dict[str, Tensor] = {}
        for load in range(2):  # the second time after other draws
            engine.load_checkpoint(out / f"checkpoint-{stage - 1}")
            noise[str(load)] = torch.rand(3)
        dump(engine, out / f"loaded-{stage}.safetensors")
        save_file(noise, out / f"noise-{stage}-{dist.get_rank()}.safetensors")
    batches = pack(trajectories(), ADVANTAGES, max_tokens=12, num_ranks=world_size)[dist.get_rank()]
    engine.forward_backward(batches, loss_fn)
    engine.optim_step()
    dump(engine, out / f"saved-{stage}.safetensors")
    pending = engine.begin_checkpoint(out / f"checkpoint-{stage}")
    engine.forward_backward(batches, loss_fn)  # what comes after is not in the checkpoint
    engine.optim_step()
    pending.wait()


def watch(model: Path, out: Path) -> None:
    """A loss function that raises on one rank, and a rank that does not come."""
    rank = dist.get_rank()
    config = FsdpConfig(
        model_path=str(model),
        optim=OptimConfig(learning_rate=0.01),
        compute_dtype="float32",
        parallel=ParallelState(dp_size=2),
        wait_timeout_s=3.0,
    )
    engine = FsdpEngine(config, device=torch.device("cpu"))
    batches = pack(trajectories(), ADVANTAGES, max_tokens=9, num_ranks=2)[rank]
    texts = {"micro-batches": str(len(batches))}
    num_calls = 0

    def raises_on_last_rank(
        policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch
    ) -> LossOutput:
        nonlocal num_calls
        num_calls += 1
        if rank == 1:
            message = "no reward"
            raise KeyError(message)
        return loss_fn(policy_logprobs, batch)

    expected = KeyError if rank == 1 else RuntimeError
    texts["raised"] = message_of(
        expected, lambda: engine.forward_backward(batches, raises_on_last_rank)
    )
    texts["calls"] = str(num_calls)
    texts["no gradient"] = message_of(RuntimeError, engine.optim_step)
    engine.forward_backward(batches, loss_fn)  # and the ranks are still together
    engine.optim_step()
    if rank == 0:
        texts["missing"] = message_of(TimeoutError, lambda: engine.logprobs(batches))
    else:
        wait_for(out / "watch-0.json")
    (out / f"watch-{rank}.json").write_text(json.dumps(texts))


def wait_for(file: Path) -> None:
    """Return when the file is there, or after a minute."""
    for _ in range(600):
        if file.exists():
            return
        time.sleep(0.1)


def muon_step(file: Path, replicas: int) -> None:
    """One step of Muon along random gradients, from 0."""
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas))
    generator = torch.Generator().manual_seed(0)
    parameters: dict[str, Tensor] = {}
    for rows, columns in ((37, 32), (32, 48), (5, 32)):
        gradient = torch.randn(rows, columns, generator=generator)
        weight = torch.zeros(rows, columns)
        placed, slope = (
            distribute_tensor(each, mesh, [Replicate(), Shard(0)]) for each in (weight, gradient)
        )
        parameters[f"{rows}x{columns}"] = placed.requires_grad_()
        placed.grad = slope
    optim = OptimConfig(learning_rate=1.0, weight_decay=0.0)
    PolicyOptimizer(
        {**parameters, "bias": torch.zeros(1, requires_grad=True)},
        optim,
        muon=MuonConfig(),
        matrices=frozenset(parameters),
    ).step(steps_done=0)
    stepped = {name: whole(parameter.detach()) for name, parameter in parameters.items()}
    if dist.get_rank() == 0:
        save_file(stepped, file)


def variants(world_size: int, replicas: int, model: Path, out: Path) -> None:
    """Two steps of each kind of training, on these ranks."""
    rank = dist.get_rank()
    kinds: dict[str, dict[str, Any]] = {
        "muon": {"muon": MuonConfig()},
        "deterministic": {"deterministic": True},
        "again": {"deterministic": True},
    }
    if importlib.util.find_spec("peft"):
        kinds["lora"] = {"lora": LoraConfig(rank=3, target_modules=("q_proj", "o_proj"))}
    for kind, settings in kinds.items():
        config = FsdpConfig(
            model_path=str(model),
            optim=OptimConfig(learning_rate=0.01, max_grad_norm=None, eps=1.0),
            compute_dtype="float32",
            parallel=ParallelState(dp_size=world_size, dp_replicate_size=replicas),
            **settings,
        )
        engine = FsdpEngine(config, device=torch.device("cpu"))
        batches = pack(trajectories(), ADVANTAGES, max_tokens=12, num_ranks=world_size)[rank]
        norms = []
        for _ in range(2):
            engine.forward_backward(batches, loss_fn)
            norms.append(engine.optim_step().grad_norm)
        weights = dict(engine.export_weights())
        name = f"{kind}-{world_size}-{replicas}"
        engine.save_checkpoint(out / name)
        before = {
            key: whole(tensor)
            for key, tensor in engine._state.tensors(engine.policy_version).items()
        }
        engine.forward_backward(batches, loss_fn)
        engine.optim_step()
        engine.load_checkpoint(out / name)
        after = engine._state.tensors(engine.policy_version)
        assert [key for key in before if not torch.equal(before[key], whole(after[key]))] == []
        if rank == 0:
            save_file({**weights, "norms": torch.tensor(norms)}, out / f"{name}.safetensors")
    torch.use_deterministic_algorithms(False)
    muon_step(out / f"muon-step-{world_size}-{replicas}.safetensors", replicas)
    if (world_size, replicas) == (2, 1):
        watch(model, out)


def main() -> None:
    """Read the arguments and run the worlds in turn."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--out"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    for stage, (world_size, replicas) in enumerate(WORLDS):
        run_ranks(
            world_size,
            arguments.out / f"meet-{stage}",
            partial(reshard, stage, world_size, replicas, arguments.model, arguments.out),
        )
    for world_size, replicas in ((1, 1), (2, 1), (2, 2)):
        run_ranks(
            world_size,
            arguments.out / f"meet-{world_size}-{replicas}",
            partial(variants, world_size, replicas, arguments.model, arguments.out),
        )


if __name__ == "__main__":
    main()
