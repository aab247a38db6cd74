"""FSDP2 around the packed model. torch's FSDP is imported on use: it takes seconds to import."""

from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import get_total_norm

from engine_fsdp.config import Offload
from engine_fsdp.model import PackedCausalLM

_CLIP_EPS = 1e-6
"""Added to the norm that clipping divides by; torch's own, so that clipping is torch's to the bit
(torch 2.13, nn/utils/clip_grad.py)."""


def shard(
    model: PackedCausalLM,
    *,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    num_shards: int,
    offload: Offload,
) -> Callable[[], None]:
    """Wrap every block and the whole, so that gradients are summed over all ranks of `mesh`.

    Returns:
        A function that frees gathered weights. Call it after every forward pass that no backward
        pass follows: a gathered copy that outlived an optimizer step would be used unchanged.
    """
    from torch.distributed.fsdp import (  # noqa: PLC0415
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # With one shard, a gathered block is only a copy in the compute type, made once per call; with
    # more, it is the memory that sharding is there to save.
    has_shards = num_shards > 1
    modules: list[FSDPModule] = []
    for module in (*model.blocks, model):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy() if offload == "parameters" else OffloadPolicy(),
            reshard_after_forward=has_shards and module is not model,
        )
        wrapped = cast("FSDPModule", module)  # fully_shard changes the module's class in place
        wrapped.set_reshard_after_backward(has_shards, recurse=False)
        if mesh.size() > 1:
            # A loss's shares add up over ranks, where FSDP2 by default averages; and gloo has
            # neither an average nor a scaled sum.
            wrapped.set_gradient_divide_factor(1.0)
            wrapped.set_force_sum_reduction_for_comms(True)
        modules.append(wrapped)

    def reshard() -> None:
        for wrapped in modules:
            wrapped.reshard()

    return reshard


def gradient_norm(parameters: Iterable[Tensor], *, mesh: DeviceMesh) -> Float[Tensor, ""]:
    """L2 norm of the whole gradient, replicas counted once; float32, the same on every rank.

    Args:
        parameters: all that have a gradient, sharded over the last axis of `mesh`.
        mesh: that `shard` was given. Its devices carry the sum, also if gradients lie elsewhere.
    """
    shards = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    square = get_total_norm(shards).float().square().to(mesh.device_type)
    group = mesh.get_group(mesh.ndim - 1)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(square, group=group)
    return square.sqrt()


def clip_gradients(
    parameters: Iterable[Tensor], *, norm: Float[Tensor, ""], max_norm: float
) -> None:
    """Scale all gradients in place by ``max_norm / norm``, if the norm is above `max_norm`."""
    shards = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not shards:
        return
    factor = (max_norm / (norm + _CLIP_EPS)).clamp(max=1.0)
    torch._foreach_mul_(shards, factor.to(shards[0].device))  # as torch's own does


def local(tensor: Tensor) -> Tensor:
    """The part of the tensor that this rank holds."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_ranks(tensor: Tensor) -> int:
    """Ranks that the tensor is spread over, copies included."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    return tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1
