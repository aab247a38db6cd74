"""Causal attention over sequences that lie end to end in one row.

Registered under a name of its own, so that transformers builds no `[tokens, tokens]` mask: each
sequence is attended to by itself, and no token can see another sequence.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

ATTENTION_NAME: Final = "engine_veomni_packed"
"""Name under which transformers knows this attention."""


def packed_attention(
    module: torch.nn.Module,  # noqa: ARG001
    query: Float[Tensor, "1 heads tokens head_dim"],
    key: Float[Tensor, "1 kv_heads tokens head_dim"],
    value: Float[Tensor, "1 kv_heads tokens head_dim"],
    attention_mask: None,  # noqa: ARG001
    *,
    scaling: float,
    sequence_lengths: tuple[int, ...],
    cu_seqlens: Int[Tensor, " sequences_plus_1"],
    **_: object,
) -> tuple[Float[Tensor, "1 tokens heads head_dim"], None]:
    """Attend causally within each of the sequences, whose lengths add up to the row.

    torch's kernel for sequences of all lengths at once runs on CUDA in bfloat16; elsewhere there is
    one call for each sequence.
    """
    if query.is_cuda and query.dtype == torch.bfloat16:
        attended = _attend_at_once(
            query, key, value, scaling, sequence_lengths=sequence_lengths, cu_seqlens=cu_seqlens
        )
    else:
        attended = _attend_one_by_one(query, key, value, scaling, sequence_lengths)
    return attended, None


def _attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
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
    rows = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]
    return attend(*rows, cu_seqlens, cu_seqlens, longest, longest, **options).unsqueeze(0)


def _attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, sequence_lengths: tuple[int, ...]
) -> Tensor:
    lengths = list(sequence_lengths)
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
    return torch.cat(parts, dim=2).transpose(1, 2)


def register_packed_attention() -> None:
    """Make the name known to transformers; doing it twice changes nothing."""
    from transformers.modeling_utils import (  # noqa: PLC0415 - loaded only when used
        ALL_ATTENTION_FUNCTIONS,
    )

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
