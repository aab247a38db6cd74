"""What a decoder block runs as: compiled or not, and what of it is kept for the backward pass.

Applied to ``block.forward``, inside of FSDP2's hooks, which gather and free around it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, assert_never

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from engine_fsdp.config import ActivationCheckpointing

BlockForward = Callable[..., Tensor]
"""Hidden states and what else transformers hands a decoder block, to hidden states."""

_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_grouped_mm"})
"""Matrix products; a linear layer is one of them."""

_ATTENTIONS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
    }
)
"""Attentions: by far the dearest to compute again for what they keep."""


def wrap_block(
    forward: BlockForward, *, checkpointing: ActivationCheckpointing, compiled: bool
) -> BlockForward:
    """The same function, as configured."""
    wrapped: BlockForward
    match checkpointing:
        case "none":
            wrapped = forward
        case "full":
            wrapped = partial(checkpoint, forward, use_reentrant=False)
        case "selective":
            wrapped = partial(
                checkpoint, forward, use_reentrant=False, context_fn=_selective_contexts
            )
        case _:
            assert_never(checkpointing)
    return _compiled(wrapped) if compiled else wrapped


def _selective_contexts() -> tuple[Any, Any]:
    """Keep attention and every second matrix product; torchtitan's choice, which halves the rest.

    Forward and recomputation count for themselves, and meet the same products in the same order.
    """
    num_products = {False: 0, True: 0}

    def policy(ctx: Any, operator: Any, *_: object, **__: object) -> CheckpointPolicy:  # noqa: ANN401
        name = operator.name().partition(".")[0]
        if name in _ATTENTIONS:
            return CheckpointPolicy.MUST_SAVE
        if name not in _PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        is_recompute = bool(ctx.is_recompute)
        num_products[is_recompute] += 1
        if num_products[is_recompute] % 2:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


def _compiled(forward: BlockForward) -> BlockForward:
    """One graph for all numbers of tokens, or an error: never a block that runs uncompiled."""

    def only_compiled(*args: object, **kwargs: object) -> Tensor:
        if not torch.compiler.is_compiling():
            message = (
                "compile_blocks = True, but torch.compile is switched off in this process "
                "(TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE or torch.compiler.set_stance); switch "
                "it on or set compile_blocks = False"
            )
            raise RuntimeError(message)
        return forward(*args, **kwargs)

    compiled: BlockForward = torch.compile(only_compiled, fullgraph=True, dynamic=True)
    return compiled
