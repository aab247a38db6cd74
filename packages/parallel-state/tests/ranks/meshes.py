"""What each gloo rank sees of its meshes."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel_state import (
    ExtraParallelSizes,
    ParallelState,
    UnknownAxisError,
    axis_names,
    rank_coordinates,
)
from parallel_state.mesh import Meshes, build_meshes
from parallel_state.sizes import AxisT


def _groups(meshes: Meshes[AxisT]) -> dict[str, list[int]]:
    coordinates = rank_coordinates(meshes.state, dist.get_rank())
    seen = {}
    for name in axis_names(meshes.state):
        assert meshes.axis(name).get_local_rank() == coordinates[name]
        assert meshes.axis(name).mesh_dim_names == (name,)
        seen[name] = dist.get_process_group_ranks(meshes.group(name))
    return seen


def one_axis() -> object:
    """Two ranks, sharded, one expert slice each."""
    state = ParallelState(dp_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=2))
    meshes = build_meshes(state, "cpu")
    return {
        "groups": _groups(meshes),
        "fsdp": meshes.fsdp.mesh_dim_names,
        "ep_fsdp": meshes.extra["ep"].fsdp.mesh_dim_names,
    }


def replicas() -> object:
    """Four ranks: two replicas of two shards, one expert slice per shard."""
    state = ParallelState(
        dp_size=4, dp_replicate_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=2)
    )
    meshes = build_meshes(state, "cpu")
    return {
        "groups": _groups(meshes),
        "fsdp": [meshes.fsdp.mesh_dim_names, meshes.fsdp.mesh.tolist()],
        "ep_fsdp": [meshes.extra["ep"].fsdp.mesh_dim_names, meshes.extra["ep"].fsdp.mesh.tolist()],
    }


def two_extra_axes() -> object:
    """Eight ranks: shards x Ulysses, and two extra axes that cut them differently."""
    state = ParallelState(
        dp_size=4, ulysses_size=2, extra_parallel_sizes=ExtraParallelSizes({"ep": 4, "emb": 2})
    )
    return {"groups": _groups(build_meshes(state, "cpu"))}


def every_dense_axis() -> object:
    """Eight ranks: two stages, two shards, two tensor ranks."""
    state = ParallelState(dp_size=2, tensor_size=2, pipeline_size=2)
    return {"groups": _groups(build_meshes(state, "cpu"))}


def wrong_world() -> object:
    """Two ranks for a state of four."""
    try:
        build_meshes(ParallelState(dp_size=4), "cpu")
    except ValueError as error:
        return str(error)
    return None


def disagreement() -> object:
    """Two ranks that were configured differently, each of them for a world of two."""
    state = ParallelState(ulysses_size=2) if dist.get_rank() else ParallelState(dp_size=2)
    try:
        build_meshes(state, "cpu")
    except ValueError as error:
        return str(error)
    return None


def device_types() -> object:
    """What is no device type of the process group, or of this machine."""
    said = []
    for device_type in ("gpu", "cpu:0", "cuda"):
        try:
            build_meshes(ParallelState(dp_size=2), device_type)
        except (RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def unknown_axis() -> object:
    """A misspelt group."""
    try:
        build_meshes(ParallelState(dp_size=2), "cpu").group("epp")
    except UnknownAxisError as error:
        return str(error)
    return None


def shard_size_one() -> object:
    """Two replicas of one shard each take one step on different data."""
    meshes = build_meshes(ParallelState(dp_size=2, dp_replicate_size=2), "cpu")
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    fully_shard(model, mesh=meshes.fsdp)
    model(torch.tensor([[dist.get_rank() + 1.0]])).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert isinstance(model.weight, DTensor)
    return model.weight.full_tensor().item()
