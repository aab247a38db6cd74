"""How the weights of one model are named in a Hugging Face folder, and in VeOmni's memory.

VeOmni stacks the experts of a layer into `experts.gate_up_proj [experts, 2 * intermediate, hidden]`
(the gate's rows first, then the up projection's) and `experts.down_proj [experts, hidden,
intermediate]`. A Hugging Face folder of Qwen3-MoE, as transformers saves it and as samplers load
it, holds one `experts.<n>.<gate|up|down>_proj.weight` per expert. Which parameters are stacks is
read from VeOmni's own parallel plan of the model, never guessed from a shape.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from rl_contracts.train import NamedTensor

Shapes = dict[str, tuple[int, ...]]
"""Shape of each weight, by its Hugging Face name."""

_STACKS: Final[Mapping[str, tuple[str, ...]]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""Parameter of the stacked module, and the projections that its rows hold, in order."""

_NAMES_SHOWN = 3


def stacked_parameters(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of the parameters that hold the experts of a layer, by VeOmni's plan of the model.

    Raises:
        ValueError: if the plan names a parameter whose layout is not known here.
    """
    from veomni.distributed.parallel_plan import get_runtime_parallel_plan  # noqa: PLC0415
    from veomni.distributed.utils import check_fqn_match  # noqa: PLC0415

    plan = get_runtime_parallel_plan(model)
    patterns = [] if plan is None else list(plan.extra_parallel_plan.get("ep", {}))
    names = tuple(
        name
        for name, _ in model.named_parameters()
        if any(check_fqn_match(pattern, name) for pattern in patterns)
    )
    for name in names:
        if name.rpartition(".")[2] not in _STACKS:
            message = (
                f"engine-veomni: VeOmni spreads {name} over ranks, and its layout is not known "
                f"here; known: {', '.join(_STACKS)}"
            )
            raise ValueError(message)
    return names


def split_stack(name: str, stack: Tensor, *, first_expert: int = 0) -> Iterator[NamedTensor]:
    """Take a stack of experts apart: one tensor per expert and projection, each a copy.

    Args:
        name: of the stack, such as `model.layers.0.mlp.experts.gate_up_proj`.
        stack: `[experts, rows, columns]`.
        first_expert: number of the first expert in it.
    """
    prefix, _, parameter = name.rpartition(".")
    projections = _STACKS[parameter]
    for index, expert in enumerate(stack, start=first_expert):
        for projection, weight in zip(
            projections, expert.chunk(len(projections), dim=0), strict=True
        ):
            yield NamedTensor(f"{prefix}.{index}.{projection}.weight", weight.clone())


def hugging_face_shapes(model: torch.nn.Module) -> Shapes:
    """Name and shape of every weight that the model's Hugging Face folder must hold."""
    stacks = set(stacked_parameters(model))
    shapes: Shapes = {}
    for name, parameter in model.named_parameters():
        if name not in stacks:
            shapes[name] = tuple(parameter.shape)
            continue
        empty = torch.empty(parameter.shape, device="meta")
        shapes.update(
            {weight.name: tuple(weight.tensor.shape) for weight in split_stack(name, empty)}
        )
    return shapes


def folder_shapes(folder: Path) -> Shapes:
    """Name and shape of every weight in a folder of safetensors; reads no weight.

    Raises:
        ValueError: if there is no safetensors file.
    """
    from safetensors import safe_open  # noqa: PLC0415

    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                shapes[name] = tuple(weights.get_slice(name).get_shape())
    if not shapes:
        message = f"engine-veomni: no *.safetensors file in {folder}"
        raise ValueError(message)
    return shapes


def check_folder(folder: Path, expected: Shapes) -> None:
    """Refuse a folder whose weights are not exactly those of the model.

    VeOmni draws a weight that is missing at random and drops one that it does not know, with a
    log line each, so a folder of another layout would train from noise.

    Raises:
        ValueError: with the first names that are missing, left over, or of another shape.
    """
    found = folder_shapes(folder)
    missing = sorted(set(expected) - set(found))
    unknown = sorted(set(found) - set(expected))
    if missing or unknown:
        hint = ""
        if any(name.rpartition(".")[2] in _STACKS for name in unknown):
            hint = (
                "; it stores the experts of a layer in one tensor: load it with transformers and "
                "save it again (save_pretrained), which writes one tensor per expert"
            )
        message = (
            f"engine-veomni: {folder} does not hold this model's weights: "
            f"missing {_some(missing)}, unknown {_some(unknown)}{hint}"
        )
        raise ValueError(message)
    for name, shape in expected.items():
        if found[name] != shape:
            message = (
                f"engine-veomni: {folder}: expected {name} of shape {shape} by config.json, "
                f"got {found[name]}"
            )
            raise ValueError(message)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN]) or "none"
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
