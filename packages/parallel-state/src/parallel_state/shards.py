"""Where the shards of each parameter lie in the whole, and whether all ranks say the same."""

import itertools
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from parallel_state.agreement import (
    by_rank,
    check_group,
    check_orthogonal,
    gathered_ints,
    gathered_texts,
)

_Groups = tuple[dist.ProcessGroup, ...]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the shard of one rank lies in the whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One parameter: this rank's shard, and what becomes of all ranks' shards."""

    name: str
    local: Tensor
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    groups: _Groups
    """Groups to gather over, in this order; none of size 1."""
    places: tuple[Place, ...]
    """One for each rank that holds another shard, in the order in which the shards arrive."""

    @property
    def num_elements(self) -> int:
        """Elements of the largest shard; the others are padded to it."""
        return max(math.prod(place.shape) for place in self.places)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What `gather_full` was asked for, as one rank says it."""

    named: Sequence[tuple[str, Tensor]]
    group: dist.ProcessGroup | None
    """Ranks with further slices along axis 0; None without any, also where this rank is alone."""
    max_bytes: int
    device: torch.device | None
    dtype: torch.dtype | None

    def target_dtype(self, parameter: Tensor) -> torch.dtype:
        """Type that a parameter is gathered in."""
        is_cast = self.dtype is not None and parameter.is_floating_point()
        return self.dtype if self.dtype is not None and is_cast else parameter.dtype

    def groups(self, parameter: Tensor) -> _Groups:
        """Groups that hold other pieces of a parameter, from the outside in; none of size 1."""
        outer = () if self.group is None else (self.group,)
        if not isinstance(parameter, DTensor):
            return outer
        mesh = parameter.device_mesh
        return (*outer, *(mesh.get_group(axis) for axis in _sharded_axes(parameter)))

    def line(self, index: int, over: dist.ProcessGroup) -> str:
        """What the ranks of a group have to agree on for one parameter."""
        name, parameter = self.named[index]
        shape = tuple(parameter.shape)
        placed = f" {parameter.placements}" if isinstance(parameter, DTensor) else ""
        return (
            f"parameter {index} {name} {f'(*, {shape[1:]})' if over is self.group else shape}"
            f"{placed} {parameter.dtype} as {self.target_dtype(parameter)}, "
            f"max_bytes {self.max_bytes}"
        )


def read_request(
    params: Iterable[tuple[str, Tensor]],
    group: dist.ProcessGroup | None,
    max_bytes: int,
    *,
    device: torch.device | None,
    dtype: torch.dtype | None,
) -> Request:
    """Take the arguments of `gather_full`.

    Raises:
        TypeError: for what has another type than the signature says.
    """
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int):
        message = (
            f"gather_full: max_bytes: expected an int, got {max_bytes!r} "
            f"({type(max_bytes).__name__})"
        )
        raise TypeError(message)
    if group is not None:
        check_group("gather_full: group", group)
    named = list(params)
    for item in named:
        match item:
            case (str(), Tensor()) if isinstance(item, tuple):
                continue
            case _:
                message = (
                    "gather_full: params: expected pairs of a name and a tensor, such as "
                    f"model.named_parameters() or a dict's items(), got {item!r:.80} "
                    f"({type(item).__name__})"
                )
                raise TypeError(message)
    is_alone = group is None or dist.get_world_size(group) == 1
    return Request(
        named=named,
        group=None if is_alone else group,
        max_bytes=max_bytes,
        device=device,
        dtype=dtype,
    )


def read_sources(request: Request, problems: Iterable[str | None]) -> list[Source]:
    """Find out where each shard belongs; collective over every group that holds shards.

    Args:
        request: what this rank brings.
        problems: reasons of this rank to refuse, beside those that are found here; None for none.

    Raises:
        ValueError: on all ranks of a group if one of them refuses, or they differ in more than
            the length of their slices.
    """
    found = itertools.chain(problems, (_problem(request, *item) for item in request.named))
    problem = next((each for each in found if each is not None), None)
    members: dict[dist.ProcessGroup, list[int]] = {}
    for index, (_, parameter) in enumerate(request.named):
        for group in request.groups(parameter):
            members.setdefault(group, []).append(index)
    if request.group is not None:
        members.setdefault(request.group, [])
    # In an order that is the same on every rank, so that no two of them wait for each other.
    ordered = sorted(
        members, key=lambda each: (dist.get_process_group_ranks(each), each.group_name)
    )
    for group in ordered:
        _check_agreement(request, group, members[group], problem)
    if problem is not None:
        raise ValueError(problem)
    lengths: list[list[int]] = [[] for _ in request.named]
    if request.group is not None:
        own = [parameter.shape[0] for _, parameter in request.named]
        device = _travels_on(request, request.group, range(len(own)))
        rows = gathered_ints(own, request.group, device)
        lengths = [list(each) for each in zip(*rows, strict=True)]
    return [
        _source(request, name, parameter, lengths=each)
        for (name, parameter), each in zip(request.named, lengths, strict=True)
    ]


def _problem(request: Request, name: str, parameter: Tensor) -> str | None:
    """Why this rank cannot bring a parameter, if so."""
    where = f"gather_full: {name}"
    if request.group is not None and not parameter.ndim:
        return f"{where}: expected slices along axis 0, got a scalar"
    local, expected = parameter, tuple(parameter.shape)
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        place = Place(offset=(0,) * parameter.ndim, shape=expected)
        for axis, placement in enumerate(parameter.placements):
            if placement.is_replicate() or parameter.device_mesh.size(axis) == 1:
                continue
            if type(placement) is not Shard:  # a subclass of it may mean another order
                return (
                    f"{where}: expected placements that are Shard or Replicate, "
                    f"got {parameter.placements}; redistribute the tensor first"
                )
            parts = split(place, placement.dim, parameter.device_mesh.size(axis))
            place = parts[parameter.device_mesh.get_local_rank(axis)]
        expected = place.shape
    if tuple(local.shape) != expected and (local.numel() or math.prod(expected)):
        return (
            f"{where}: expected a shard of shape {expected} on this rank, as "
            f"{parameter.placements if isinstance(parameter, DTensor) else ()} cuts "
            f"{tuple(parameter.shape)}, got {tuple(local.shape)}"
        )
    if local.layout is not torch.strided or local.device.type == "meta":
        return (
            f"{where}: expected a dense tensor with data, got layout {local.layout} on "
            f"{local.device}"
        )
    try:
        check_orthogonal(where, request.groups(parameter))
    except ValueError as error:
        return str(error)
    return None


def _check_agreement(
    request: Request, group: dist.ProcessGroup, indices: Sequence[int], problem: str | None
) -> None:
    """Refuse on all ranks of `group` what one of them refuses, or says otherwise."""
    device = _travels_on(request, group, indices)
    lines = [request.line(index, group) for index in indices]
    # A digest that is the same in every process, unlike the hash of a string.
    digest = zlib.crc32("\n".join(lines).encode())
    said = gathered_ints([problem is not None, len(lines), digest], group, device)
    if problem is not None:
        raise ValueError(problem)
    ranks = dist.get_process_group_ranks(group)
    if refusing := [rank for rank, (refuses, *_) in zip(ranks, said, strict=True) if refuses]:
        message = (
            f"gather_full: refused by rank {', '.join(map(str, refusing))}, whose error says why"
        )
        raise ValueError(message)
    if all(other == said[0] for other in said):
        return
    counts = [f"{count} parameters" for _, count, _ in said]
    everyone = [text.splitlines() for text in gathered_texts("\n".join(lines), group, device)]
    # What differs first; a list that ends earlier differs there.
    for each in itertools.zip_longest(*everyone, fillvalue="no further parameter"):
        if len(set(each)) > 1:
            counts = list(each)
            break
    message = (
        "gather_full: expected the same parameters on every rank of the group, apart from their "
        f"length along axis 0, got {by_rank(counts, group)}"
    )
    raise ValueError(message)


def _travels_on(request: Request, group: dist.ProcessGroup, indices: Iterable[int]) -> torch.device:
    """Device of a group's collectives: that of its first parameter, if it is one."""
    if request.device is not None:
        return request.device
    parameters = [request.named[index][1] for index in indices]
    if not parameters or parameters[0].device.type == "meta":
        # Such as "cpu:gloo,cuda:nccl"
        return torch.device(dist.get_backend_config(group).partition(":")[0])
    return parameters[0].device


def _source(request: Request, name: str, parameter: Tensor, *, lengths: Sequence[int]) -> Source:
    local = parameter.detach()
    shape = tuple(parameter.shape)
    places = [Place(offset=(0,) * len(shape), shape=shape)]
    # From the outside in: each step splits every place of the step before.
    if lengths:
        starts = itertools.accumulate(lengths, initial=0)
        places = [
            Place(offset=(start, *(0,) * (len(shape) - 1)), shape=(length, *shape[1:]))
            for start, length in zip(starts, lengths, strict=False)  # the last start is the end
        ]
        shape = (sum(lengths), *shape[1:])
    if isinstance(local, DTensor):
        for axis, dim in _sharded_axes(local).items():
            num_parts = local.device_mesh.size(axis)
            places = [part for place in places for part in split(place, dim, num_parts)]
        local = local.to_local()
    return Source(
        name=name,
        local=local,
        dtype=request.target_dtype(local),
        device=local.device if request.device is None else request.device,
        shape=shape,
        # From the inside out, so that the ranks of the innermost are neighbours among the rows.
        groups=tuple(reversed(request.groups(parameter))),
        places=tuple(places),
    )


def _sharded_axes(parameter: DTensor) -> dict[int, int]:
    """Axes of the mesh over which a parameter is sharded, and the axis of the tensor each cuts."""
    return {
        axis: getattr(placement, "dim", 0)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and parameter.device_mesh.size(axis) > 1
    }


def split(place: Place, axis: int, num_parts: int) -> list[Place]:
    """The shards of one tensor as `Shard` cuts them: equal ones, then a shorter one, then none."""
    length = place.shape[axis]
    part = -(-length // num_parts)
    parts = []
    for index in range(num_parts):
        start = min(index * part, length)
        offset, shape = list(place.offset), list(place.shape)
        offset[axis] += start
        shape[axis] = min(part, length - start)
        parts.append(Place(offset=tuple(offset), shape=tuple(shape)))
    return parts
