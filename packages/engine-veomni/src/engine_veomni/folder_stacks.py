"""Stacks of experts as a model's Hugging Face folder holds them.

Qwen3-MoE's folders hold one matrix per expert and projection (`rl_contracts.expert_layout`). Those
of Qwen3-VL-MoE hold the stack itself with its last two axes swapped, `[experts, in, out]`, under
the parameter's own name: so are the published files, and vLLM reads nothing else. (transformers
5.19 writes `[experts, out, in]` for a model that was not loaded from such files.)
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from rl_contracts.expert_layout import view_stack
from rl_contracts.train import NamedTensor

_SWAPPED_TYPES: Final = ("qwen3_vl_moe",)
"""`model_type` of the configurations whose folders hold stacks."""

_PIECES: Final = 8
"""In which a stack is swapped; a piece is copied at a time."""


def holds_stacks(model: torch.nn.Module) -> bool:
    """Whether the folder of this model of VeOmni's holds stacks, with their last axes swapped."""
    described: Any = model.config
    return described.model_type in _SWAPPED_TYPES


def in_folder(
    name: str, stack: Float[Tensor, "experts out in"], *, stacked: bool
) -> Iterator[NamedTensor]:
    """A parameter of experts as its folder holds it: in the memory of `stack`, which it may change.

    Args:
        name: of the parameter.
        stack: contiguous, and nobody else's.
        stacked: see `holds_stacks`; a few experts at a time are swapped in place, since a copy
            would take the memory of a second stack.
    """
    if stacked:
        num_experts, out, inner = stack.shape
        swapped = stack.view(num_experts, inner, out)
        at_once = max(1, num_experts // _PIECES)
        for whole, target in zip(stack.split(at_once), swapped.split(at_once), strict=True):
            target.copy_(whole.transpose(1, 2).contiguous())
        yield NamedTensor(name, swapped)
    else:
        yield from view_stack(name, stack)
