"""Sums over ranks that every engine needs, each of which is silently wrong in a known way.

A mean is a sum divided by a *global* count. The gradient norm counts every piece of a gradient
once: the shards of all ranks that hold different pieces, and one replica of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from parallel_state.agreement import by_rank, check_group, check_orthogonal, gathered_texts
from parallel_state.sizes import check_count, check_int


def global_sum(value: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Add up `value` over `group`, element by element; all ranks get the same result.

    The result is a new tensor, on the device of `value`. Integers and bools are summed as int64;
    floats in their own type, in which large counts are not exact.
    For counts of tokens the group is that of the axis `data`: ranks that share a sequence hold
    different tokens of it.

    Raises:
        TypeError: if `value` is no plain tensor of real numbers, or `group` no process group that
            this rank is in.
        ValueError: if the ranks bring other shapes or types; all of them raise it.
    """
    check_group("global_sum", group)
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.is_complex():
        message = (
            "global_sum: expected a plain tensor of real numbers, got "
            f"{value.dtype if isinstance(value, Tensor) else repr(value)} ({type(value).__name__})"
        )
        raise TypeError(message)
    total = value.detach()
    total = total if total.is_floating_point() else total.to(torch.int64)
    described = gathered_texts(f"{total.dtype} {tuple(total.shape)}", group, total.device)
    if len(set(described)) > 1:
        message = (
            "global_sum: expected the same type and shape on every rank, got "
            f"{by_rank(described, group)}"
        )
        raise ValueError(message)
    # Row-major on every rank: what travels is memory, in whatever order it lies.
    total = total.clone(memory_format=torch.contiguous_format)
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

    Raises:
        TypeError: if a number is no int; a count that is a tensor is `int(count)`.
        ValueError: if `global_count` is below 0 or `averaged_over` below 1.
    """
    check_int("share_of_mean: global_count", global_count)
    if global_count < 0:
        message = f"share_of_mean: global_count: expected an int of at least 0, got {global_count}"
        raise ValueError(message)
    check_count("share_of_mean: averaged_over", averaged_over)
    return local_sum * (averaged_over / global_count if global_count else 0.0)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedParameters:
    """Parameters whose local tensors are pieces over the same process groups.

    What a DTensor says of itself need not be repeated: the mesh axes that it is sharded over are
    found, those that it is replicated over are left out.

    Raises:
        TypeError: if `parameters` is no list or tuple of tensors, such as a generator, of which
            the second reader would find nothing; or `groups` holds what is no process group that
            this rank is in.
    """

    parameters: Sequence[Tensor]
    """The same ones in the same order on every rank, also where this rank has no gradient."""

    groups: Sequence[dist.ProcessGroup] = ()
    """Groups whose ranks hold other pieces, beyond what the DTensors know.

    Such as the group of `ep` for experts: each of its ranks has different ones, while their
    DTensors know the axis `ep_fsdp` only.
    """

    def __post_init__(self) -> None:
        """Refuse what would be left out, or summed over other ranks, without a word."""
        if not isinstance(self.parameters, Sequence) or not all(
            isinstance(each, Tensor) for each in self.parameters
        ):
            message = (
                "ShardedParameters.parameters: expected a list or tuple of tensors, such as "
                f"list(model.parameters()), got {type(self.parameters).__name__}"
            )
            raise TypeError(message)
        for group in self.groups:
            check_group("ShardedParameters.groups", group)


def global_grad_norm(parts: Sequence[ShardedParameters], *, device: torch.device) -> Tensor:
    """Compute the L2 norm of the whole gradient, the same on every rank.

    Replicas are counted once. A parameter without gradient counts as zero, and its rank still
    takes part in the sum, so ranks whose experts saw no token do not leave the others waiting.

    Args:
        parts: all parameters, each in one part; the same parts in the same order on every rank.
        device: where sums travel: the device type of the process groups. Gradients may lie
            elsewhere (offloaded to the CPU).

    Returns:
        A float32 scalar on `device`; infinite or NaN if any gradient is, and infinite from about
        1.8e19 on, whose square float32 does not hold.

    Raises:
        TypeError: if `parts` is no list or tuple of `ShardedParameters`.
        ValueError: if a parameter is given twice, a gradient is sparse or placed unlike its
            parameter, as with a pending sum (`Partial`), or a group of a part has ranks that the
            DTensor is sharded over already.
    """
    # Insertion order is that of the parameters, hence the same on every rank.
    squares: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
    for parameter, part in _each_once("global_grad_norm", parts):
        groups = (*_sharded_over(parameter), *part.groups)
        known = squares.get(groups)
        if known is None:
            check_orthogonal("global_grad_norm", groups)
            known = torch.zeros((), dtype=torch.float32, device=device)
        squares[groups] = known + _squared_norm(parameter.grad).to(device)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for groups, square in squares.items():
        for group in groups:
            if dist.get_world_size(group) > 1:
                dist.all_reduce(square, op=dist.ReduceOp.SUM, group=group)
        total += square
    return total.sqrt()


def clip_grads_(parts: Sequence[ShardedParameters], *, norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place by ``max_norm / norm`` if the norm is above `max_norm`.

    `norm` is what `global_grad_norm` returned for the same parts. Works on local tensors, so
    gradients on different meshes may be mixed. Does not wait for the device. An infinite norm
    would turn gradients into NaN: look at the norm first.

    Raises:
        TypeError: if `parts` is no list or tuple of `ShardedParameters`.
        ValueError: if `max_norm` is not above 0, or a parameter is given twice.
    """
    if not max_norm > 0.0:
        message = f"clip_grads_: expected max_norm above 0, got {max_norm}"
        raise ValueError(message)
    factor = (max_norm / norm).clamp(max=1.0)
    for parameter, _ in _each_once("clip_grads_", parts):
        if parameter.grad is not None:
            local = _local(parameter.grad).detach()
            local.mul_(factor.to(local.device))


def _each_once(
    where: str, parts: Sequence[ShardedParameters]
) -> Iterator[tuple[Tensor, ShardedParameters]]:
    """Every parameter with its part.

    Raises:
        TypeError: if `parts` is something that one look exhausts: norm and clipping both look.
        ValueError: if a parameter is there twice, as tied weights in two lists are.
    """
    if not isinstance(parts, Sequence) or not all(
        isinstance(each, ShardedParameters) for each in parts
    ):
        message = (
            f"{where}: parts: expected a list or tuple of ShardedParameters, "
            f"got {type(parts).__name__}"
        )
        raise TypeError(message)
    seen: set[int] = set()
    for number, part in enumerate(parts):
        for index, parameter in enumerate(part.parameters):
            if id(parameter) in seen:
                message = (
                    f"{where}: expected each parameter once, got parameter {index} of part "
                    f"{number}, of shape {tuple(parameter.shape)}, a second time; tied weights "
                    "are one parameter"
                )
                raise ValueError(message)
            seen.add(id(parameter))
            yield parameter, part


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local()
        return local
    return tensor


def _squared_norm(grad: Tensor | None) -> Tensor:
    if grad is None:
        return torch.zeros((), dtype=torch.float32)
    local = _local(grad).detach()
    if local.layout is not torch.strided:
        message = f"global_grad_norm: expected a dense gradient, got one of layout {local.layout}"
        raise ValueError(message)
    # The accumulation is in float32 for narrower types, without a copy of the gradient.
    norm: Tensor = torch.linalg.vector_norm(
        local, dtype=torch.promote_types(local.dtype, torch.float32)
    )
    return norm.float().square()


def _sharded_over(parameter: Tensor) -> Iterator[dist.ProcessGroup]:
    grad = parameter.grad
    placed, grad_placed = _placed(parameter), _placed(parameter if grad is None else grad)
    if placed != grad_placed or any(each.is_partial() for each in placed[1]):
        message = (
            "global_grad_norm: expected a gradient placed like its parameter and no pending sum, "
            f"got a gradient on {_said(grad_placed)} for a parameter on {_said(placed)}; reduce it "
            "first"
        )
        raise ValueError(message)
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                yield parameter.device_mesh.get_group(axis)


def _placed(tensor: Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | tuple[None, tuple[()]]:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else (None, ())


def _said(placed: tuple[DeviceMesh | None, tuple[Placement, ...]]) -> str:
    mesh, placements = placed
    return "no mesh" if mesh is None else f"{placements} over {mesh.mesh_dim_names}"
