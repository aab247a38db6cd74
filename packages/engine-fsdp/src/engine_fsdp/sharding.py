"""FSDP2 around the packed model. torch's FSDP is imported on use: it takes seconds to import."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from engine_fsdp.model import PackedCausalLM


def shard(
    model: PackedCausalLM, *, mesh: DeviceMesh, compute_dtype: torch.dtype, num_shards: int
) -> Callable[[], None]:
    """Wrap every block and the whole, so that gradients are summed over all ranks of `mesh`.

    Returns:
        A function that frees gathered weights. Call it after every forward pass that no backward
        pass follows: a gathered copy that outlived an optimizer step would be used unchanged.
    """
    from torch.distributed.fsdp import (  # noqa: PLC0415
        FSDPModule,
        MixedPrecisionPolicy,
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


def whole(tensor: Tensor) -> Tensor:
    """The tensor over all ranks; a collective for one that is sharded."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The part of the tensor that this rank holds."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_ranks(tensor: Tensor) -> int:
    """Ranks that the tensor is spread over, copies included."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    return tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1
