"""Which weights the Hugging Face folder of VeOmni's model must hold.

VeOmni stacks the experts of a layer as `rl_contracts.expert_layout` describes. Which parameters are
stacks is read from VeOmni's own parallel plan of the model, never guessed from a shape.
"""

from pathlib import Path

import torch

from engine_veomni.folder_stacks import holds_stacks, in_folder
from rl_contracts.expert_layout import is_stack
from rl_contracts.pretrained import folder_shapes

Shapes = dict[str, tuple[int, ...]]
"""Shape of each weight, by its Hugging Face name."""

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
        if not is_stack(name):
            message = (
                f"engine-veomni: VeOmni spreads {name} over ranks, and its layout is not known "
                "here; known are experts.gate_up_proj and experts.down_proj"
            )
            raise ValueError(message)
    return names


def hugging_face_shapes(model: torch.nn.Module) -> Shapes:
    """Name and shape of every weight that the model's Hugging Face folder must hold."""
    stacks, stacked = set(stacked_parameters(model)), holds_stacks(model)
    shapes: Shapes = {}
    for name, parameter in model.named_parameters():
        if name not in stacks:
            shapes[name] = tuple(parameter.shape)
            continue
        empty = torch.empty(parameter.shape, device="meta")
        shapes.update(
            {
                weight.name: tuple(weight.tensor.shape)
                for weight in in_folder(name, empty, stacked=stacked)
            }
        )
    return shapes


def check_folder(folder: Path, expected: Shapes) -> None:
    """Refuse a folder whose weights are not exactly those of the model.

    VeOmni draws a weight that is missing at random and drops one that it does not know, with a
    log line each, so a folder of another layout would train from noise.

    Raises:
        FileNotFoundError: if the folder holds no safetensors.
        ValueError: with the first names that are missing, left over, or of another shape.
    """
    found = folder_shapes(folder)
    missing = sorted(set(expected) - set(found))
    unknown = sorted(set(found) - set(expected))
    if missing or unknown:
        hint = ""
        if any(is_stack(name) for name in unknown):
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
