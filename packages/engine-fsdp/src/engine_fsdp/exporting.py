"""Whole weights under the names of the folder, one after the other, in bounded memory."""

from collections.abc import Iterable, Iterator
from itertools import chain, starmap

import torch
from torch import Tensor

from engine_fsdp.model import PackedCausalLM
from parallel_state.gather import gather_full
from rl_contracts.expert_layout import split_stack
from rl_contracts.train import NamedTensor

GATHER_BYTES = 2**29
"""Memory for shards on their way, in bytes: enough to keep a link busy, and little beside a model.
Among eight ranks, pieces of 30 MB."""


def exported_weights(
    model: PackedCausalLM,
    *,
    device: torch.device,
    dtype: torch.dtype,
    gather_bytes: int = GATHER_BYTES,
) -> Iterator[NamedTensor]:
    """All weights, gathered in the type that they are wanted in; collective.

    The extra memory is `gather_bytes` and one whole tensor; for stacked experts, which are taken
    apart, the stack and one of its parts, or as many as the caller keeps.

    Args:
        model: sharded.
        device: where whole tensors arrive.
        dtype: type of what is yielded.
        gather_bytes: memory for shards on their way.
    """
    gathered = gather_full(model.named_weights(), None, gather_bytes, device=device, dtype=dtype)

    def parts(name: str, weight: Tensor) -> Iterable[NamedTensor]:
        return split_stack(name, weight) if name in model.stacks else (NamedTensor(name, weight),)

    # Not a loop, whose variable would keep one tensor in memory while the next one arrives.
    return chain.from_iterable(starmap(parts, gathered))
