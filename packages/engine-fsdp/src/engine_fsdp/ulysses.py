"""Ulysses: the ranks of a group share every sequence (Jacobs et al. 2023, arXiv:2309.14509).

Each rank holds a slice of the tokens and runs all of the model on it but attention, for which the
ranks swap slices of the tokens for slices of the heads, and back.

    [tokens / ranks, heads, dim]  --all-to-all-->  [tokens, heads / ranks, dim]
"""

from typing import Any, final

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from engine_fsdp.attention_groups import PackedGroups
from engine_fsdp.attention_varlen import PackedVarlen


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
        num_ranks = dist.get_world_size(self.group)
        if key.shape[1] < num_ranks:
            # Ranks in a row whose query heads look at the same key-value head get a copy each.
            copies = num_ranks // key.shape[1]
            key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
        attended = self.whole.attend(
            *(self._to_heads(states) for states in (query, key, value)), scaling=scaling
        )
        return self._to_tokens(attended)

    def _to_heads(self, states: Float[Tensor, "slice heads dim"]) -> Tensor:
        num_ranks = dist.get_world_size(self.group)
        by_rank = states.unflatten(1, (num_ranks, -1)).transpose(0, 1)
        return _swap(by_rank, self.group).flatten(0, 1)

    def _to_tokens(self, states: Float[Tensor, "tokens heads_of_rank dim"]) -> Tensor:
        num_ranks = dist.get_world_size(self.group)
        by_rank = states.unflatten(0, (num_ranks, -1))
        return _swap(by_rank, self.group).transpose(0, 1).flatten(1, 2)


def gather_rows(
    rows: Float[Tensor, " own"], counts: tuple[int, ...], group: dist.ProcessGroup
) -> Float[Tensor, " all"]:
    """All ranks' rows, one rank's after the other's; each rank's gradient is that of its own.

    Every rank computes the same loss from them, which is counted once, so nothing is added up over
    the ranks on the way back.

    Args:
        rows: this rank's.
        counts: how many each rank has.
        group: the ranks.
    """
    gathered: Tensor = _Gather.apply(rows, counts, group)  # type: ignore[no-untyped-call]
    return gathered


def _swap(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send entry i to rank i, and get what rank i has for this one as entry i."""
    swapped: Tensor = _Swap.apply(by_rank, group)  # type: ignore[no-untyped-call]
    return swapped


class _Swap(torch.autograd.Function):
    """All-to-all, which is its own gradient."""

    @staticmethod
    def forward(ctx: Any, by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.group = group
        sent = by_rank.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        sent = grads[0].contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        return received, None


class _Gather(torch.autograd.Function):
    """Rows of all ranks, padded to the longest while they travel."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        rows: Tensor,
        counts: tuple[int, ...],
        group: dist.ProcessGroup,
    ) -> Tensor:
        rank = dist.get_rank(group)
        ctx.first, ctx.count = sum(counts[:rank]), counts[rank]
        padded = rows.new_zeros(max(counts))
        padded[: rows.shape[0]] = rows
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(received, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return grads[0][ctx.first : ctx.first + ctx.count], None, None
