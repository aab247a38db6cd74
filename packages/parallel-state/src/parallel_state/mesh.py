"""Named device meshes for a `ParallelState`; needs the extra `mesh`, that is torch.

`build_meshes` is collective: every rank of the run calls it with an equal state, after
`torch.distributed.init_process_group`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel_state.agreement import by_rank, gathered_texts
from parallel_state.layout import axis_names
from parallel_state.sizes import AxisT, unknown_axis
from parallel_state.state import ParallelState


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraMesh:
    """An extra axis and what its parameters are sharded over beside it."""

    axis: DeviceMesh
    """One-dimensional, named after the axis: ranks that hold different slices."""

    fsdp: DeviceMesh
    """What `fully_shard` takes for parameters that are already sliced along the axis.

    `("ep_fsdp",)`, or `("dp_replicate", "ep_fsdp")` if the state has replicas.
    """


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Meshes(Generic[AxisT]):
    """The device meshes of one run, as seen from this rank."""

    state: ParallelState[AxisT]
    """What they were built from."""

    fsdp: DeviceMesh
    """What `fully_shard` takes for dense parameters.

    `("fsdp",)`, or `("dp_replicate", "fsdp")` if the state has replicas (HSDP).
    """

    extra: Mapping[AxisT, ExtraMesh]
    """One entry per extra axis of the state, in its order, also for an axis of size 1."""

    axes: Mapping[str, DeviceMesh]
    """A one-dimensional mesh for every name of `parallel_state.axis_names`, in that order."""

    def axis(self, name: str) -> DeviceMesh:
        """The one-dimensional mesh of an axis.

        Raises:
            UnknownAxisError: if the state has no axis of that name.
        """
        if name not in self.axes:
            raise unknown_axis(name, tuple(self.axes), where="this run")
        return self.axes[name]

    def group(self, name: str) -> dist.ProcessGroup:
        """The process group of this rank on an axis.

        Raises:
            UnknownAxisError: if the state has no axis of that name.
        """
        return self.axis(name).get_group()


def build_meshes(state: ParallelState[AxisT], device_type: str) -> Meshes[AxisT]:
    """Build every mesh of `state` on devices of type `device_type`: "cuda", "npu" or "cpu".

    The groups are those of `parallel_state.axis_groups`. On accelerators choose this process's
    device first, as with `torch.cuda.set_device`.

    Raises:
        TypeError: if `state` is no `ParallelState`.
        RuntimeError: if there is no process group yet, or no device of that type.
        ValueError: if the process group's world is not the state's, the ranks differ in their
            state, or the process group has no backend for the device type; the message has what
            was asked for and what there is.
    """
    if not isinstance(state, ParallelState):
        message = f"build_meshes: expected a ParallelState, got {state!r} ({type(state).__name__})"
        raise TypeError(message)
    if not dist.is_initialized():
        message = (
            "build_meshes: there is no process group yet; "
            "call torch.distributed.init_process_group first"
        )
        raise RuntimeError(message)
    _check_device_type(device_type)
    _check_agreement(state, device_type)
    state.check_world(dist.get_world_size())
    # One root for each way of cutting the world: what FSDP2 combines (dp_replicate, fsdp, tensor)
    # shares a root, and no mesh is flattened, for which torch has private names only.
    sizes = state.dense_sizes
    outer = {"pipeline": sizes["pipeline"], "dp_replicate": sizes["dp_replicate"]}
    inner = {"tensor": sizes["tensor"]}
    sharding = _root(device_type, {**outer, "fsdp": state.fsdp_size, **inner})
    dense = _root(device_type, sizes)
    data = _root(device_type, {"pipeline": sizes["pipeline"], "data": state.data_size, **inner})
    axes = {
        **{name: sharding[name] for name in ("pipeline", "dp_replicate", "fsdp", "tensor")},
        "dp_shard": dense["dp_shard"],
        "ulysses": dense["ulysses"],
        "data": data["data"],
    }
    has_replicas = state.dp_replicate_size > 1
    extra: dict[AxisT, ExtraMesh] = {}
    for axis, size in state.extra_parallel_sizes.items():
        fsdp = f"{axis}_fsdp"
        root = _root(device_type, {**outer, fsdp: state.extra_fsdp_size(axis), axis: size, **inner})
        axes[fsdp], axes[axis] = root[fsdp], root[str(axis)]
        extra[axis] = ExtraMesh(
            axis=root[str(axis)], fsdp=root["dp_replicate", fsdp] if has_replicas else root[fsdp]
        )
    return Meshes(
        state=state,
        fsdp=sharding["dp_replicate", "fsdp"] if has_replicas else sharding["fsdp"],
        extra=MappingProxyType(extra),
        axes=MappingProxyType({name: axes[name] for name in axis_names(state)}),
    )


def _check_device_type(device_type: str) -> None:
    # Such as "cpu:gloo,cuda:nccl"
    config = dist.get_backend_config()
    known = [part.partition(":")[0] for part in config.split(",")]
    if device_type not in known:
        message = (
            f"build_meshes: device_type: expected one that the process group has a backend for, "
            f"{' or '.join(known)} (it was initialised with {config}), got {device_type!r}"
        )
        raise ValueError(message)
    if device_type != "cpu" and not torch.get_device_module(device_type).is_available():
        message = f"build_meshes: there is no device of the type {device_type!r} in this process"
        raise RuntimeError(message)


def _check_agreement(state: ParallelState[AxisT], device_type: str) -> None:
    """Refuse, on all ranks, states that differ: their meshes would be silently different."""
    # A mesh for all ranks chooses the device of a process that has not, as any first mesh does.
    world = _root(device_type, {"world": dist.get_world_size()}).get_group()
    texts = gathered_texts(repr(state), world, torch.device(device_type))
    if len(set(texts)) > 1:
        message = (
            f"build_meshes: expected an equal state on every rank, got {by_rank(texts, world)}"
        )
        raise ValueError(message)


def _root(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
