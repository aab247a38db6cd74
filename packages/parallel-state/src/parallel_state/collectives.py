"""Sums over ranks that every engine needs, each of which is silently wrong in a known way.

A mean is a sum divided by a *global* count. The gradient norm counts every piece of a gradient
once: the shards of all ranks that hold different pieces, and one replica of each.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def global_sum(value: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Add up `value` over `group`, element by element; all ranks get the same result.

    The result is a new tensor, on the device of `value`. Integers and bools are summed as int64.
    For counts of tokens the group is that of the axis `data`: ranks that share a sequence hold
    different tokens of it.
    """
    total = value.detach().clone()
    if not total.is_floating_point():
        total = total.to(torch.int64)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total


def share_of_mean(local_sum: Tensor, *, global_count: int, averaged_over: int) -> Tensor:
    """Scale this rank's sum so that averaged gradients come out as those of the global mean.

    FSDP divides a gradient by the number of ranks that it was reduced over. The share is
    ``local_sum / global_count * averaged_over``; its mean over the ranks is the global mean.

    Args:
        local_sum: sum over this rank's tokens (or sequences); carries the gradient.
        global_count: number of tokens (or sequences) on all ranks. If it is 0 the share is 0, and
            the graph is kept, so that the backward pass still takes part in collectives.
        averaged_over: ranks that the gradient is averaged over: `ParallelState.data_size` with
            FSDP, sequence-parallel ranks included; 1 if gradients are summed.
    """
    return local_sum * (averaged_over / max(global_count, 1))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedParameters:
    """Parameters whose local tensors are pieces over the same process groups.

    What a DTensor says of itself need not be repeated: the mesh axes that it is sharded over are
    found, those that it is replicated over are left out.
    """

    parameters: Sequence[Tensor]
    """The same ones in the same order on every rank, also where this rank has no gradient."""

    groups: Sequence[dist.ProcessGroup] = ()
    """Groups whose ranks hold other pieces, beyond what the DTensors know.

    Such as the group of `ep` for experts: each of its ranks has different ones, while their
    DTensors know the axis `ep_fsdp` only.
    """


def global_grad_norm(parts: Iterable[ShardedParameters], *, device: torch.device) -> Tensor:
    """Compute the L2 norm of the whole gradient, the same on every rank.

    Replicas are counted once. A parameter without gradient counts as zero, and its rank still
    takes part in the sum, so ranks whose experts saw no token do not leave the others waiting.

    Args:
        parts: all parameters, each in one part.
        device: where sums travel: the device type of the process groups. Gradients may lie
            elsewhere (offloaded to the CPU).

    Returns:
        A float32 scalar on `device`; infinite or NaN if any gradient is.

    Raises:
        ValueError: if a gradient is placed unlike its parameter, as with a pending sum (`Partial`).
    """
    # Insertion order is that of the parameters, hence the same on every rank.
    squares: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
    for part in parts:
        for parameter in part.parameters:
            groups = (*_sharded_over(parameter), *part.groups)
            known = squares.get(groups)
            if known is None:
                known = torch.zeros((), dtype=torch.float32, device=device)
            squares[groups] = known + _squared_norm(parameter.grad).to(device)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for groups, square in squares.items():
        for group in groups:
            if dist.get_world_size(group) > 1:
                dist.all_reduce(square, op=dist.ReduceOp.SUM, group=group)
        total += square
    return total.sqrt()


def clip_grads_(parts: Iterable[ShardedParameters], *, norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place by ``max_norm / norm`` if the norm is above `max_norm`.

    `norm` is what `global_grad_norm` returned for the same parts. Works on local tensors, so
    gradients on different meshes may be mixed. Does not wait for the device. An infinite norm
    would turn gradients into NaN: look at the norm first.

    Raises:
        ValueError: if `max_norm` is not above 0.
    """
    if not max_norm > 0.0:
        message = f"clip_grads_: expected max_norm above 0, got {max_norm}"
        raise ValueError(message)
    factor = (max_norm / norm).clamp(max=1.0)
    for part in parts:
        for parameter in part.parameters:
            if parameter.grad is not None:
                local = _local(parameter.grad)
                local.mul_(factor.to(local.device))


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local()
        return local
    return tensor


def _squared_norm(grad: Tensor | None) -> Tensor:
    if grad is None:
        return torch.zeros((), dtype=torch.float32)
    # The accumulation is in float32 whatever the gradient's dtype, without a copy of it.
    norm: Tensor = torch.linalg.vector_norm(_local(grad).detach(), dtype=torch.float32)
    return norm.square()


def _sharded_over(parameter: Tensor) -> Iterator[dist.ProcessGroup]:
    if not isinstance(parameter, DTensor):
        return
    placements, grad = parameter.placements, parameter.grad
    grad_placements = grad.placements if isinstance(grad, DTensor) else placements
    if grad_placements != placements or any(each.is_partial() for each in placements):
        message = (
            "global_grad_norm: expected a gradient placed like its parameter and no pending sum, "
            f"got a gradient on {grad_placements} for a parameter on {placements}; reduce it first"
        )
        raise ValueError(message)
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            yield parameter.device_mesh.get_group(axis)
