"""Whole weights under Hugging Face names, from shards and from experts spread over ranks."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine_veomni.hf_layout import stacked_parameters
from engine_veomni.veomni_state import VeomniState
from parallel_state.gather import gather_full
from rl_contracts.expert_layout import split_stack
from rl_contracts.train import NamedTensor


def export_weights(
    model: torch.nn.Module, state: VeomniState, *, dtype: torch.dtype, max_bytes: int
) -> Iterator[NamedTensor]:
    """Gather dense weights and then stacks of experts; every rank must run this to its end.

    Each shard is cast before it travels, and every yielded tensor is memory of its own. Beside
    what the caller holds, `max_bytes` of chunks and one whole tensor are in memory: at most a stack
    of one layer's experts, and the expert that is taken out of it.
    """
    with state.entered():
        stacks = set(stacked_parameters(model))
    # no `torch.no_grad` around a generator: its wrapper holds what was yielded last
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    dense = [(name, parameter) for name, parameter in named if name not in stacks]
    experts = [(name, parameter) for name, parameter in named if name in stacks]
    for name, whole in gather_full(dense, None, max_bytes, dtype=dtype):
        yield NamedTensor(name, whole)
        del whole
    for name, stack in gather_full(experts, state.ep_group, max_bytes, dtype=dtype):
        yield from split_stack(name, stack)
        del stack


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, not a copy of it."""
    assert isinstance(tensor, DTensor)  # noqa: S101 - VeOmni shards every parameter
    return tensor.to_local()
