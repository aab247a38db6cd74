"""The same small thing of every rank of torch.distributed."""

from typing import TypeVar

import torch.distributed as dist

ValueT = TypeVar("ValueT")


def from_all_ranks(value: ValueT) -> list[ValueT]:
    """Every rank's value, in the order of the ranks; called on all of them, with plain values."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
