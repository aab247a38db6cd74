"""How the experts of a layer are named in a Hugging Face folder, and in an engine's memory.

Engines (transformers 5, VeOmni) stack the experts of a layer into `experts.gate_up_proj [experts,
2 * intermediate, hidden]`, the gate's rows first and then the up projection's, and
`experts.down_proj [experts, hidden, intermediate]`. The folders of Qwen2-MoE's relatives, as
transformers saves them and as samplers load them, hold one
`experts.<n>.<gate|up|down>_proj.weight` per expert (transformers 5.19, conversion_mapping.py,
`qwen2_moe`).
"""

from collections.abc import Iterator, Mapping
from typing import Final

from jaxtyping import Float
from torch import Tensor

from rl_contracts.train import NamedTensor

_STACKS: Final[Mapping[str, tuple[str, ...]]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""Parameter that is a stack, and the projections that its rows hold, in order."""


def is_stack(name: str) -> bool:
    """Whether a parameter of this name is a stack of experts whose layout is known here."""
    prefix, _, parameter = name.rpartition(".")
    return parameter in _STACKS and prefix.rpartition(".")[2] == "experts"


def view_stack(
    name: str, stack: Float[Tensor, "experts rows columns"], *, first_expert: int = 0
) -> Iterator[NamedTensor]:
    """Look at a stack as one matrix per expert and projection, under the names in the folder.

    Args:
        name: of the stack, such as `model.layers.0.mlp.experts.gate_up_proj`.
        stack: the weights; what is yielded are views of it.
        first_expert: number of the first expert in it.

    Raises:
        ValueError: for the name of no known stack.
    """
    if not is_stack(name):
        message = (
            f"{name}: expected a stack of experts, whose name ends in "
            f"{' or '.join(f'experts.{parameter}' for parameter in _STACKS)}"
        )
        raise ValueError(message)
    prefix, _, parameter = name.rpartition(".")
    projections = _STACKS[parameter]
    for index, expert in enumerate(stack, start=first_expert):
        for projection, weight in zip(
            projections, expert.chunk(len(projections), dim=0), strict=True
        ):
            yield NamedTensor(f"{prefix}.{index}.{projection}.weight", weight)


def split_stack(
    name: str, stack: Float[Tensor, "experts rows columns"], *, first_expert: int = 0
) -> Iterator[NamedTensor]:
    """Take a stack apart as `view_stack` does, into copies that share no memory."""
    for part_name, weight in view_stack(name, stack, first_expert=first_expert):
        yield NamedTensor(part_name, weight.clone())
