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


def holds_stacks(model: torch.nn.Module) -> bool:
    """Whether the folder of this model of VeOmni's holds stacks, with their last axes swapped."""
    described: Any = model.config
    return described.model_type in _SWAPPED_TYPES


def in_folder(
    name: str, stack: Float[Tensor, "experts out in"], *, stacked: bool
) -> Iterator[NamedTensor]:
    """A parameter of experts as its folder holds it: one contiguous copy, or many views."""
    if stacked:
        yield NamedTensor(name, stack.transpose(1, 2).contiguous())
    else:
        yield from view_stack(name, stack)
