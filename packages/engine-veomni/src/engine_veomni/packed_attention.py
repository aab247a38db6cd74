"""Causal attention over sequences that lie end to end in one row.

Registered under a name of its own, so that transformers builds no `[tokens, tokens]` mask: each
sequence is attended to by itself, and no token can see another sequence.
"""

from typing import Final

import torch
from jaxtyping import Float
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
    **_: object,
) -> tuple[Float[Tensor, "1 tokens heads head_dim"], None]:
    """Attend causally within each of the sequences, whose lengths add up to the row."""
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
        if part_query.shape[2] > 0
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def register_packed_attention() -> None:
    """Make the name known to transformers; doing it twice changes nothing."""
    from transformers.modeling_utils import (  # noqa: PLC0415 - loaded only when used
        ALL_ATTENTION_FUNCTIONS,
    )

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
