"""Attention over packed sequences: no padding in the batch, no mask, no flash-attn.

Registered with transformers under `ATTENTION_NAME`. transformers builds no mask for a name that
is not in its mask interface (transformers 5.19, masking_utils.py, `_preprocess_mask_arguments`),
so where the sequences begin travels as the keyword argument `packed` through the model's layers.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from engine_fsdp.attention_groups import PackedGroups
from engine_fsdp.attention_varlen import PackedVarlen
from engine_fsdp.ulysses import PackedUlysses

ATTENTION_NAME = "engine_fsdp_packed"
"""Name of this implementation in transformers' `AttentionInterface`."""

_NOT_OFFERED = ("sliding_window", "softcap", "s_aux", "position_bias", "cache")
"""Arguments that transformers' attentions take and that change the result."""

PackedSequences = PackedGroups | PackedVarlen | PackedUlysses
"""Where the sequences of one micro-batch lie."""


def lay_out(
    cu_seqlens: Int[Tensor, " sequences_plus_1"], *, device: torch.device, dtype: torch.dtype
) -> PackedGroups | PackedVarlen:
    """Lay out the sequences that begin at `cu_seqlens` for the attention that suits.

    Args:
        cu_seqlens: where each sequence begins, and the number of tokens last; on the CPU.
        device: where the attention runs.
        dtype: type of the hidden states. The GPU's kernel takes no float32, which is computed by
            groups on every device.
    """
    if device.type == "cpu" or dtype == torch.float32:
        return PackedGroups.of(cu_seqlens, device)
    return PackedVarlen.of(cu_seqlens, device)


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens dim"],
    key: Float[Tensor, "1 kv_heads tokens dim"],
    value: Float[Tensor, "1 kv_heads tokens dim"],
    attention_mask: Tensor | None,
    *,
    packed: PackedSequences | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: object,
) -> tuple[Float[Tensor, "1 tokens heads dim"], None]:
    """Causal attention within each sequence, with transformers' signature of an attention.

    Raises:
        ValueError: if the model asks for anything else, such as a window or a soft cap.
    """
    asked = {name: others.get(name) for name in _NOT_OFFERED if others.get(name) is not None}
    if attention_mask is not None:
        asked["attention_mask"] = tuple(attention_mask.shape)
    if dropout:
        asked["dropout"] = dropout
    if packed is None:
        asked["packed"] = None
    if asked or packed is None or not getattr(module, "is_causal", True):
        message = (
            f"{type(module).__name__}: engine-fsdp's packed attention is causal within whole "
            f"sequences, without mask, window, soft cap, sink or dropout; the model asked for "
            f"{asked or 'attention to later tokens'}"
        )
        raise ValueError(message)
    # [1, heads, tokens, dim] to [tokens, heads, dim], without a copy
    attended = packed.attend(
        *(states[0].transpose(0, 1) for states in (query, key, value)), scaling=scaling
    )
    return attended.unsqueeze(0), None


def register_attention() -> None:
    """Make `packed_attention` known to transformers; again and again is fine."""
    from transformers import AttentionInterface  # noqa: PLC0415  # heavy, and only for users

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
