"""Whole weights under Hugging Face names, from shards and from experts spread over ranks."""

from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine_veomni.hf_layout import stacked_parameters
from engine_veomni.veomni_state import VeomniState
from rl_contracts.expert_layout import split_stack
from rl_contracts.train import NamedTensor


def export_weights(
    model: torch.nn.Module, state: VeomniState, *, dtype: torch.dtype
) -> Iterator[NamedTensor]:
    """Gather one parameter after the other; every rank must run this to its end.

    Each shard is cast before it travels, and every yielded tensor is memory of its own. Beside
    what was yielded, one parameter is in memory: at most the experts of one layer.
    """
    with state.entered():
        stacks = set(stacked_parameters(model))
    for name, parameter in model.named_parameters():
        whole = _whole(parameter, dtype)
        if name not in stacks:
            yield NamedTensor(name, whole)
        elif state.ep_group is None:
            yield from split_stack(name, whole)
        else:
            shares = [torch.empty_like(whole) for _ in range(state.ep_size)]
            dist.all_gather(shares, whole, group=state.ep_group)
            for rank, share in enumerate(shares):
                yield from split_stack(name, share, first_expert=rank * share.shape[0])


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, not a copy of it."""
    assert isinstance(tensor, DTensor)  # noqa: S101 - VeOmni shards every parameter
    return tensor.to_local()


@torch.no_grad()
def _whole(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The parameter over the ranks that it is sharded over, contiguous, never a view of it."""
    whole = cast("DTensor", parameter.detach().to(dtype)).full_tensor().contiguous()
    shard = local_shard(parameter)
    if whole.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr():
        return whole.clone()
    return whole
