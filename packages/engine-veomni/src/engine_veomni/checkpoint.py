"""Checkpoints: the shards of every rank as safetensors, in a folder that appears by one rename.

    <folder>/checkpoint.json          degrees, world size, policy version
    <folder>/rank-00000.safetensors   this rank's shards of weights and optimizer, random state

Nothing in it is pickled. It is taken back by the same number of ranks with the same degrees;
`save_pretrained` writes weights that any number of ranks can start from.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from engine_veomni.export import local_shard
from parallel_state import ParallelState
from rl_contracts.rollout import PolicyVersion
from rl_contracts.shared_folder import new_folder

FORMAT: Final = 1
_DESCRIPTION: Final = "checkpoint.json"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def save_checkpoint(
    folder: Path,
    model: torch.nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    *,
    parallel: ParallelState,
    policy_version: PolicyVersion,
) -> None:
    """Write this rank's part; rank 0 makes the folder appear when all parts are there.

    Raises:
        FileExistsError: if the folder exists.
    """
    from safetensors.torch import save_file  # noqa: PLC0415 - loaded only when used

    with new_folder(folder) as unfinished:
        save_file(
            {name: tensor.contiguous() for name, tensor in _tensors(model, optimizers)},
            unfinished / _rank_file(),
        )
        if dist.get_rank() == 0:
            (unfinished / _DESCRIPTION).write_text(
                json.dumps({**_description(parallel), "policy_version": policy_version}, indent=2)
            )


def load_checkpoint(
    folder: Path,
    model: torch.nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    *,
    parallel: ParallelState,
) -> PolicyVersion:
    """Take back this rank's part and return the policy version.

    Raises:
        ValueError: if the folder was written by another number of ranks, with other degrees, or
            for another model.
    """
    from safetensors.torch import load_file  # noqa: PLC0415 - loaded only when used

    saved = json.loads((folder / _DESCRIPTION).read_text())
    version = PolicyVersion(saved.pop("policy_version"))
    if saved != (present := _description(parallel)):
        message = (
            f"engine-veomni: {folder} was written with {saved}, this engine runs with {present}; "
            "resume with the same degrees, or start from a folder of save_pretrained"
        )
        raise ValueError(message)
    tensors = load_file(folder / _rank_file())
    parameters = {f"weight.{name}": shard for name, shard in _shards(model)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name in parameters}
    expected = {name: tuple(shard.shape) for name, shard in parameters.items()}
    if found != expected:
        differing = sorted(name for name in expected if found.get(name) != expected[name])
        message = (
            f"engine-veomni: {folder} holds another model: "
            f"{len(differing)} of {len(expected)} shards differ, the first is {differing[0]}: "
            f"expected shape {expected[differing[0]]}, got {found.get(differing[0])}"
        )
        raise ValueError(message)
    for name, shard in parameters.items():
        shard.copy_(tensors[name])
    _load_moments(model, optimizers, tensors)
    torch.set_rng_state(tensors["random_state"])
    return version


def _rank_file() -> str:
    return f"rank-{dist.get_rank():05d}.safetensors"


def _description(parallel: ParallelState) -> dict[str, object]:
    return {
        "format": FORMAT,
        "world_size": dist.get_world_size(),
        "dp_size": parallel.dp_size,
        "dp_replicate_size": parallel.dp_replicate_size,
        "extra_parallel_sizes": parallel.extra_parallel_sizes.as_dict(),
    }


def _shards(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, local_shard(parameter.detach())


def _tensors(
    model: torch.nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]
) -> Iterator[tuple[str, Tensor]]:
    for name, shard in _shards(model):
        yield f"weight.{name}", shard
    yield "random_state", torch.get_rng_state()
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            moments = optimizer.state.get(parameter)
            if moments:
                yield f"step.{name}", moments["step"]
                for moment in _MOMENTS:
                    yield f"{moment}.{name}", local_shard(moments[moment])


def _load_moments(
    model: torch.nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    tensors: dict[str, Tensor],
) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        optimizer.state.clear()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[parameter]
                if f"step.{name}" not in tensors:
                    continue
                # the fused AdamW counts its steps where the weights are
                step = tensors[f"step.{name}"].to(local_shard(parameter.detach()).device)
                moments = {"step": step}
                for moment in _MOMENTS:
                    moments[moment] = torch.zeros_like(parameter)
                    local_shard(moments[moment]).copy_(tensors[f"{moment}.{name}"])
                optimizer.state[parameter] = moments
