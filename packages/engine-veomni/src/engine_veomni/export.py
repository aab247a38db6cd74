"""Whole weights under Hugging Face names, from shards and from experts spread over ranks."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine_veomni.folder_stacks import holds_stacks, in_folder
from engine_veomni.hf_layout import stacked_parameters
from engine_veomni.veomni_state import VeomniState
from parallel_state.gather import gather_full
from rl_contracts.train import NamedTensor


def export_weights(
    model: torch.nn.Module,
    state: VeomniState,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_bytes: int,
) -> Iterator[NamedTensor]:
    """Gather dense weights and then stacks of experts; every rank must run this to its end.

    Each shard is cast before it travels. Nobody writes to a yielded tensor afterwards. Those of the
    experts of a stack share its memory, which is freed with the last of them: a copy of each would
    be as many small kernels, whose launches take longer than the stack's way between ranks. Beside
    what the caller holds, `max_bytes` of chunks and one whole tensor are in memory, at most a stack
    of one layer's experts; where the folder holds swapped stacks, an eighth of it besides.
    """
    with state.entered():
        stacks = set(stacked_parameters(model))
    # no `torch.no_grad` around a generator: its wrapper holds what was yielded last
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    stacked = holds_stacks(model)
    dense = [(name, parameter) for name, parameter in named if name not in stacks]
    experts = [(name, parameter) for name, parameter in named if name in stacks]
    for name, whole in gather_full(dense, None, max_bytes, device=device, dtype=dtype):
        yield NamedTensor(name, whole)
        del whole
    for name, stack in gather_full(experts, state.ep_group, max_bytes, device=device, dtype=dtype):
        yield from in_folder(name, stack, stacked=stacked)
        del stack


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, not a copy of it."""
    assert isinstance(tensor, DTensor)  # noqa: S101 - VeOmni shards every parameter
    return tensor.to_local()
