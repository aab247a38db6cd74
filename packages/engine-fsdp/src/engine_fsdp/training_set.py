"""Which weights are trained, and that those that are not stay what they were."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from engine_fsdp.eight_bit import SCALED_TOGETHER
from engine_fsdp.model import PackedCausalLM
from engine_fsdp.sharding import local

_MATRIX_NDIM = 2


def freeze(model: PackedCausalLM, patterns: Sequence[str]) -> None:
    """Take the parameters whose name matches a pattern out of training. Before they are sharded.

    A weight that another one is tied to goes by its one name: the embedding's, not the head's.

    Raises:
        ValueError: if a pattern matches nothing, or nothing is left to train.
    """
    named: Mapping[str, Tensor] = dict(model.model.named_parameters())
    for pattern in patterns:
        matching = [name for name in named if fnmatchcase(name, pattern)]
        if not matching:
            message = (
                f"freeze: {pattern!r} matches no parameter; they are named like "
                f"{', '.join(list(named)[:3])} (* stands for anything)"
            )
            raise ValueError(message)
        for name in matching:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        message = f"freeze: {', '.join(map(repr, patterns))} leave nothing to train"
        raise ValueError(message)


def trained_parameters(model: PackedCausalLM) -> dict[str, Tensor]:
    """All that have a gradient, by name."""
    named: Mapping[str, Tensor] = dict(model.model.named_parameters())
    return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


def block_matrices(model: PackedCausalLM) -> frozenset[str]:
    """Names of the two-dimensional weights inside of the blocks."""
    inside = {id(parameter) for block in model.blocks for parameter in block.parameters()}
    return frozenset(
        name
        for name, parameter in model.model.named_parameters()
        if id(parameter) in inside and parameter.ndim == _MATRIX_NDIM
    )


def eight_bit_weights(model: PackedCausalLM) -> frozenset[str]:
    """Names of the trained weights whose moments have 8 bits, if that is asked for.

    They are the matrices inside of the blocks, and stacks of them, whose rows divide into pieces
    that share a scale. Embedding and head are not among them: their gradients differ most from row
    to row (Dettmers et al. 2021, arXiv:2110.02861, section 2.3).

    Raises:
        ValueError: if there are none.
    """
    inside = {id(parameter) for block in model.blocks for parameter in block.parameters()}
    matrices = {
        name: parameter
        for name, parameter in trained_parameters(model).items()
        if id(parameter) in inside and parameter.ndim >= _MATRIX_NDIM
    }
    found = {name for name, matrix in matrices.items() if matrix.shape[-1] % SCALED_TOGETHER == 0}
    if not found:
        lengths = ", ".join(map(str, sorted({matrix.shape[-1] for matrix in matrices.values()})))
        message = (
            "eight_bit_moments = True: expected trained matrices in the blocks whose rows are "
            f"multiples of the {SCALED_TOGETHER} elements that share a scale, got rows of "
            f"{lengths or 'nothing, since none is trained'}; set eight_bit_moments = False"
        )
        raise ValueError(message)
    return frozenset(found)


def digest(weights: Mapping[str, Tensor], *, mesh: DeviceMesh) -> Tensor:
    """One int64 per weight that changes with its bits, the same on any number of ranks.

    The bits of the elements, taken as integers, are added up; sums wrap around.

    Args:
        weights: float32, sharded over the last axis of `mesh`.
        mesh: of all ranks.
    """
    sums = torch.tensor(
        [
            int(local(weight.detach()).view(torch.int32).sum(dtype=torch.int64))
            for weight in weights.values()
        ],
        dtype=torch.int64,
        device=mesh.device_type,
    )
    group = mesh.get_group(mesh.ndim - 1)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(sums, group=group)
    return sums.cpu()


def check_frozen(here: Tensor, there: Tensor, names: Sequence[str], *, folder: object) -> None:
    """Refuse a checkpoint whose weights were trained beside other frozen ones.

    Raises:
        ValueError: with the number of them, or the name of the first that differs.
    """
    if there.shape != here.shape:
        message = (
            f"{folder}: the checkpoint was written beside {there.numel()} frozen weights, here are "
            f"{here.numel()}; resume with the same lora or freeze"
        )
        raise ValueError(message)
    differing = [name for name, own, other in zip(names, here, there, strict=True) if own != other]
    if differing:
        message = (
            f"{folder}: the checkpoint was written beside other frozen weights: {len(differing)} "
            f"of {len(names)} differ, the first is {differing[0]}; resume with the model_path that "
            "training began with"
        )
        raise ValueError(message)
