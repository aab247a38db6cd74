"""A layout of sequences whose tokens lie on several ranks; see `parallel_state.ulysses`."""

import functools
from typing import final

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from engine_fsdp.attention_groups import PackedGroups
from engine_fsdp.attention_varlen import PackedVarlen
from parallel_state.ulysses import attend_together


@final
class PackedUlysses:
    """The sequences of one micro-batch, whose tokens lie on the ranks of a group in equal slices.

    Not a dataclass: FSDP2 copies the dataclasses among its modules' arguments.
    """

    __slots__ = ("group", "whole")

    def __init__(self, *, whole: PackedGroups | PackedVarlen, group: dist.ProcessGroup) -> None:
        self.whole = whole
        """All tokens, as attention sees them."""
        self.group = group
        """Ranks that share them, in the order of their slices."""

    @property
    def num_calls(self) -> int:
        """Attention calls that used this layout."""
        return self.whole.num_calls

    def attend(
        self,
        query: Float[Tensor, "slice heads dim"],
        key: Float[Tensor, "slice kv_heads dim"],
        value: Float[Tensor, "slice kv_heads dim"],
        *,
        scaling: float | None,
    ) -> Float[Tensor, "slice heads dim"]:
        """Causal attention within each sequence."""
        attend = functools.partial(self.whole.attend, scaling=scaling)
        return attend_together(attend, query, key, value, group=self.group)
