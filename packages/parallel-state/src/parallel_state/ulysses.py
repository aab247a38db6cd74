"""Ulysses: the ranks of a group share every sequence (Jacobs et al. 2023, arXiv:2309.14509).

Each rank holds a slice of the tokens and runs all of the model on it but attention, for which the
ranks swap slices of the tokens for slices of the heads, and back.

    [tokens / ranks, heads, dim]  --all-to-all-->  [tokens, heads / ranks, dim]
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSlice:
    """One rank's part of packed sequences, on the CPU."""

    token_ids: Int[Tensor, " slice"]
    """This rank's tokens; those of all ranks end to end are the sequences, and what fills them."""

    positions: Int[Tensor, " slice"]
    """Their positions in their sequences."""

    rows: Int[Tensor, " rows"]
    """Places in the slice whose hidden state predicts a token in the loss mask."""

    targets: Int[Tensor, " rows"]
    """The tokens that they predict."""

    cu_seqlens: Int[Tensor, " sequences_plus_1"]
    """Where the sequences of all ranks begin, and the number of tokens last; one more sequence
    where tokens had to be filled up to a multiple of the ranks."""

    scored: Int[Tensor, " all_rows"]
    """Places of the predicted tokens of all ranks among all tokens, in order."""

    row_counts: tuple[int, ...]
    """Rows of each rank; they add up to `scored`."""


def token_slice(
    *,
    token_ids: Int[Tensor, " tokens"],
    positions: Int[Tensor, " tokens"],
    cu_seqlens: Int[Tensor, " sequences_plus_1"],
    loss_mask: Bool[Tensor, " tokens"],
    num_ranks: int = 1,
    rank: int = 0,
) -> TokenSlice:
    """Cut out a rank's part; with one rank it is everything.

    The token before predicts a token; no other token has a row.

    Args:
        token_ids: of all sequences, end to end.
        positions: of each token in its sequence.
        cu_seqlens: where each sequence begins, and the number of tokens last.
        loss_mask: True on the tokens to predict; never on the first of a sequence.
        num_ranks: ranks that share the tokens.
        rank: which of them.
    """
    token_ids, positions = token_ids.cpu(), positions.cpu()
    cu_seqlens, scored = cu_seqlens.cpu(), loss_mask.cpu().nonzero()[:, 0]
    if filling := -token_ids.shape[0] % num_ranks:  # a sequence that nothing is read of
        token_ids = torch.cat([token_ids, token_ids.new_zeros(filling)])
        positions = torch.cat([positions, torch.arange(filling)])
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + filling])
    length = token_ids.shape[0] // num_ranks
    predicting = scored - 1
    borders = torch.searchsorted(predicting, torch.arange(num_ranks + 1) * length).tolist()
    own = slice(borders[rank], borders[rank + 1])
    cut = slice(rank * length, (rank + 1) * length)
    return TokenSlice(
        token_ids=token_ids[cut],
        positions=positions[cut],
        rows=predicting[own] - cut.start,
        targets=token_ids[scored[own]],
        cu_seqlens=cu_seqlens,
        scored=scored,
        row_counts=tuple(end - begin for begin, end in pairwise(borders)),
    )


def attend_together(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Float[Tensor, "slice heads dim"],
    key: Float[Tensor, "slice kv_heads dim"],
    value: Float[Tensor, "slice kv_heads dim"],
    *,
    group: dist.ProcessGroup,
) -> Float[Tensor, "slice heads dim"]:
    """Attention over the tokens of all ranks: each rank computes some of the heads.

    Args:
        attend: attention over all tokens, for the heads that it is given: ``[tokens, heads, dim]``
            three times, and once back.
        query: of this rank's tokens; the ranks must divide its heads.
        key: likewise; where it has fewer heads than there are ranks, it must divide the ranks.
        value: likewise.
        group: the ranks, in the order of their slices.
    """
    num_ranks = dist.get_world_size(group)
    if key.shape[1] < num_ranks:
        # Ranks in a row whose query heads look at the same key-value head get a copy each.
        copies = num_ranks // key.shape[1]
        key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
    attended = attend(*(_to_heads(states, group) for states in (query, key, value)))
    return _to_tokens(attended, group)


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


def _to_heads(states: Float[Tensor, "slice heads dim"], group: dist.ProcessGroup) -> Tensor:
    by_rank = states.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1)
    return _swap(by_rank, group).flatten(0, 1)


def _to_tokens(states: Float[Tensor, "tokens heads dim"], group: dist.ProcessGroup) -> Tensor:
    by_rank = states.unflatten(0, (dist.get_world_size(group), -1))
    return _swap(by_rank, group).transpose(0, 1).flatten(1, 2)


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
