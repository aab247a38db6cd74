"""Causal attention over sequences that lie end to end in one row.

Registered under a name of its own, so that transformers builds no `[tokens, tokens]` mask: each
sequence is attended to by itself, and no token can see another sequence.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from parallel_state.ulysses import attend_together

ATTENTION_NAME: Final = "engine_veomni_packed"
"""Name under which transformers knows this attention."""


def packed_attention(
    module: torch.nn.Module,  # noqa: ARG001
    query: Float[Tensor, "1 heads slice head_dim"],
    key: Float[Tensor, "1 kv_heads slice head_dim"],
    value: Float[Tensor, "1 kv_heads slice head_dim"],
    attention_mask: None,  # noqa: ARG001
    *,
    scaling: float,
    sequence_lengths: tuple[int, ...],
    cu_seqlens: Int[Tensor, " sequences_plus_1"],
    ulysses_group: dist.ProcessGroup | None = None,
    **_: object,
) -> tuple[Float[Tensor, "1 slice heads head_dim"], None]:
    """Attend causally within each of the sequences, whose lengths add up to the row.

    With a group the row is that of all its ranks, of which this one holds a slice.

    torch's kernel for sequences of all lengths at once runs on CUDA in bfloat16; elsewhere there is
    one call for each sequence.
    """
    attend = functools.partial(
        _attend_at_once if query.is_cuda and query.dtype == torch.bfloat16 else _attend_one_by_one,
        scaling=scaling,
        sequence_lengths=sequence_lengths,
        cu_seqlens=cu_seqlens,
    )
    rows = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]
    attended = (
        attend(*rows)
        if ulysses_group is None
        else attend_together(attend, *rows, group=ulysses_group)
    )
    return attended.unsqueeze(0), None


def _attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    sequence_lengths: tuple[int, ...],
    cu_seqlens: Tensor,
) -> Tensor:
    from torch.nn.attention import varlen  # noqa: PLC0415 - for CUDA only

    attend: Callable[..., Tensor] = varlen.varlen_attn  # type: ignore[assignment] # without aux
    longest = max(sequence_lengths)
    options: dict[str, Any] = {"window_size": (-1, 0), "scale": scaling}
    # torch 2.13 wants to be told that several query heads share one of the keys; 2.11 has no word
    # for it, and its kernel does it unasked
    if "enable_gqa" in inspect.signature(attend).parameters:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    return attend(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)


def _attend_one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    sequence_lengths: tuple[int, ...],
    cu_seqlens: Tensor,  # noqa: ARG001
) -> Tensor:
    lengths = list(sequence_lengths)
    query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            part_query, part_key, part_value, is_causal=True, scale=scaling, enable_gqa=True
        )
        for part_query, part_key, part_value in zip(
            query.split(lengths, dim=2),
            key.split(lengths, dim=2),
            value.split(lengths, dim=2),
            strict=True,
        )
    ]
    return torch.cat(parts, dim=2).squeeze(0).transpose(0, 1)


def register_packed_attention() -> None:
    """Make the name known to transformers; doing it twice changes nothing."""
    from transformers.modeling_utils import (  # noqa: PLC0415 - loaded only when used
        ALL_ATTENTION_FUNCTIONS,
    )

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
