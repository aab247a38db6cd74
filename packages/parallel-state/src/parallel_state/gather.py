"""Whole parameters from shards, one after the other, in a bounded amount of memory.

    this rank's shards  a a a a b b c c c | c d d ...     cut into chunks, whatever the borders
                        ------------------+------
    each chunk          travels to all ranks that hold other pieces, over one group after the other,
                        and its parts are copied to where they belong in the whole tensors

A whole tensor is allocated when its first part arrives and handed out with its last one, so beside
the chunk there is one whole tensor at a time. Small tensors share a chunk, large ones take many.
"""

import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

# torch 2.13 renamed it, and warns of the name that older versions have
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_ALIGNMENT = 16
"""Bytes; the largest element (complex128), so that any type may start at a multiple of it."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where the shard of one rank lies in the whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """One parameter: this rank's shard, and what becomes of all ranks' shards."""

    name: str
    local: Tensor
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    groups: tuple[dist.ProcessGroup, ...]
    """Groups to gather over, in this order; none of size 1."""
    places: tuple[_Place, ...]
    """One for each rank that holds another shard, in the order in which the shards arrive."""

    @property
    def num_elements(self) -> int:
        """Elements of the largest shard; the others are padded to it."""
        return max(math.prod(place.shape) for place in self.places)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Segment:
    """Elements `start` to `stop` of every rank's shard of a parameter, and where in the chunk."""

    source: _Source
    start: int
    stop: int
    position: int

    def of(self, chunk: Tensor, length: int) -> Tensor:
        """The first `length` elements of this segment in a chunk of bytes."""
        size = length * self.source.dtype.itemsize
        return chunk[self.position : self.position + size].view(self.source.dtype)


def gather_full(
    params: Iterable[tuple[str, Tensor]],
    group: dist.ProcessGroup | None,
    max_bytes: int,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter whole, in the order given, on all ranks that take part.

    A DTensor is gathered over the mesh axes that it is sharded over, uneven shards included; axes
    that it is replicated over (HSDP) cost nothing. Every yielded tensor is contiguous memory of its
    own, bit-equal to the shards, and is neither kept nor written to afterwards.

    The extra memory is at most `max_bytes` and one whole tensor, beside what the caller still
    holds: in a loop, ``del`` the tensor before the next one is asked for. The ranks must run the
    iterator to its end, with the same parameters.

    Args:
        params: names and parameters, as of `Module.named_parameters`; the same ones in the same
            order on every rank. Only references are kept.
        group: ranks that hold further slices along axis 0, in their order, beyond what the DTensors
            know: the group of `ep` for experts that are plain tensors, or DTensors on `ep_fsdp`.
            The slices may differ in length. None for parameters that are no such slices.
        max_bytes: memory for chunks on their way, in bytes. On gloo that includes its own copy.
        device: where chunks travel and whole tensors arrive; the device type of the groups.
            None: where each shard is.
        dtype: type that floating-point parameters are cast to before they travel. None: their own.

    Raises:
        TypeError: if `max_bytes` is no int.
        ValueError: if `max_bytes` is too small for a chunk, a placement is neither `Shard` nor
            `Replicate`, or the ranks of `group` do not hold slices of the same parameters.
    """
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int):
        message = (
            f"gather_full: max_bytes: expected an int, got {max_bytes!r} "
            f"({type(max_bytes).__name__})"
        )
        raise TypeError(message)
    named = list(params)
    lengths = _slice_lengths(named, group, device)
    sources = [
        _source(name, parameter, group=group, lengths=each, device=device, dtype=dtype)
        for (name, parameter), each in zip(named, lengths, strict=True)
    ]
    for source in sources:
        _chunk_bytes(source.groups, max_bytes)  # refuses before anything travels
    return _gather(sources, max_bytes)


def _gather(sources: Sequence[_Source], max_bytes: int) -> Iterator[tuple[str, Tensor]]:
    for (groups, device), run in itertools.groupby(sources, lambda s: (s.groups, s.device)):
        if groups:
            chunk_bytes = _chunk_bytes(groups, max_bytes)
            yield from _gather_run(_chunks(run, chunk_bytes), groups, device)
            continue
        for source in run:
            whole = [torch.empty(source.shape, dtype=source.dtype, device=device)]
            whole[0].copy_(source.local)
            yield source.name, whole.pop()


def _gather_run(
    chunks: Iterable[Sequence[_Segment]],
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    # A list, emptied by `pop`: a variable would keep the tensor alive while the next one arrives.
    whole: list[Tensor] = []
    for segments in chunks:
        received = _all_gather(_packed(segments, device), groups)
        for segment in segments:
            source = segment.source
            if segment.start == 0:
                whole.append(torch.empty(source.shape, dtype=source.dtype, device=device))
            _unpack(segment, received, whole[0])
            if segment.stop == source.num_elements:
                yield source.name, whole.pop()
        del received  # before the next chunk is allocated


def _packed(segments: Sequence[_Segment], device: torch.device) -> Tensor:
    """This rank's part of a chunk; where its shard is shorter than others, undefined bytes."""
    last = segments[-1]
    size = last.position + (last.stop - last.start) * last.source.dtype.itemsize
    packed = torch.empty(_aligned(size), dtype=torch.uint8, device=device)
    for segment in segments:
        local = segment.source.local
        stop = min(segment.stop, local.numel())
        if segment.start < stop:
            values = segment.of(packed, stop - segment.start)
            for piece, flat in _pieces(local, segment.start, values):
                flat.view(piece.shape).copy_(piece)
    return packed


def _unpack(segment: _Segment, received: Tensor, whole: Tensor) -> None:
    """Copy the segments of all ranks to their places.

    A function of its own, so that no view of `received` outlives it.
    """
    for place, chunk in zip(segment.source.places, received, strict=True):
        target = whole
        for axis, (offset, length) in enumerate(zip(place.offset, place.shape, strict=True)):
            target = target.narrow(axis, offset, length)
        stop = min(segment.stop, target.numel())
        if segment.start < stop:
            values = segment.of(chunk, stop - segment.start)
            for piece, flat in _pieces(target, segment.start, values):
                piece.copy_(flat.view(piece.shape))


def _all_gather(packed: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The parts of all ranks as rows; the index in the first group runs fastest."""
    row_bytes = packed.numel()
    for group in groups:
        received = packed.new_empty(dist.get_world_size(group) * packed.numel())
        _all_gather_single(received, packed, group=group)
        packed = received
    return packed.view(-1, row_bytes)


def _pieces(tensor: Tensor, start: int, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of `tensor` that cover its elements from `start` on, with their part of `flat`.

    In row-major order, and without a copy: a tensor that is not contiguous falls into whole rows
    and, recursively, the parts of rows at both ends.
    """
    if tensor.is_contiguous():
        yield tensor.view(-1)[start : start + flat.numel()], flat
        return
    row_size = tensor[0].numel()
    done = 0
    while done < flat.numel():
        row, column = divmod(start + done, row_size)
        num_rows = (flat.numel() - done) // row_size
        if column or not num_rows:
            length = min(row_size - column, flat.numel() - done)
            yield from _pieces(tensor[row], column, flat[done : done + length])
        else:
            length = num_rows * row_size
            yield tensor[row : row + num_rows], flat[done : done + length]
        done += length


def _chunks(sources: Iterable[_Source], chunk_bytes: int) -> Iterator[list[_Segment]]:
    segments: list[_Segment] = []
    position = 0
    for source in sources:
        start, stop, item_bytes = 0, -1, source.dtype.itemsize
        while stop < source.num_elements:
            if segments and chunk_bytes - position < item_bytes:
                yield segments
                segments, position = [], 0
            stop = min(source.num_elements, start + (chunk_bytes - position) // item_bytes)
            segments.append(_Segment(source=source, start=start, stop=stop, position=position))
            position = _aligned(position + (stop - start) * item_bytes)
            start = stop
    if segments:
        yield segments


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _chunk_bytes(groups: Sequence[dist.ProcessGroup], max_bytes: int) -> int:
    """Bytes of this rank's part of a chunk, so that all that is in memory at once fits."""
    sizes = [dist.get_world_size(group) for group in groups]
    # The last hop is the largest: what it sends, what it receives, and what gloo receives into
    # (ProcessGroupGloo's all-gather fills one flat tensor of its own and copies it out).
    parts = math.prod(sizes[:-1]) + 2 * math.prod(sizes)
    chunk_bytes = max_bytes // parts // _ALIGNMENT * _ALIGNMENT
    if not chunk_bytes:
        message = (
            f"gather_full: max_bytes: expected at least {_ALIGNMENT * parts} for groups of "
            f"{' * '.join(map(str, sizes)) or 1} ranks, got {max_bytes}"
        )
        raise ValueError(message)
    return chunk_bytes


def _slice_lengths(
    named: Sequence[tuple[str, Tensor]],
    group: dist.ProcessGroup | None,
    device: torch.device | None,
) -> list[list[int]]:
    """Length along axis 0 of each parameter on each rank of `group`; nothing without such ranks.

    Raises:
        ValueError: if the ranks differ in more than that.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [[] for _ in named]
    for name, parameter in named:
        if not parameter.ndim:
            message = f"gather_full: {name}: expected slices along axis 0, got a scalar"
            raise ValueError(message)
    if device is None:
        device = named[0][1].device if named else torch.device("cpu")
    described = [(name, str(p.dtype), p.shape[1:], _placements(p)) for name, p in named]
    # A digest that is the same in every process, unlike the hash of a string.
    digest = zlib.crc32(repr(described).encode())
    everyone = _exchanged([len(named), digest], group, device)
    if any(other != everyone[0] for other in everyone):
        message = (
            "gather_full: expected the same parameters on every rank of the group, apart from "
            "their length along axis 0, got "
            + ", ".join(f"{count} (digest {found:08x})" for count, found in everyone)
        )
        raise ValueError(message)
    lengths = _exchanged([parameter.shape[0] for _, parameter in named], group, device)
    return [list(each) for each in zip(*lengths, strict=True)]


def _exchanged(
    values: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> list[list[int]]:
    own = torch.tensor(values, dtype=torch.int64, device=device)
    everyone = own.new_empty(dist.get_world_size(group) * own.numel())
    _all_gather_single(everyone, own, group=group)
    rows: list[list[int]] = everyone.view(-1, own.numel()).tolist()
    return rows


def _placements(parameter: Tensor) -> str:
    return str(parameter.placements) if isinstance(parameter, DTensor) else ""


def _source(
    name: str,
    parameter: Tensor,
    *,
    group: dist.ProcessGroup | None,
    lengths: Sequence[int],
    device: torch.device | None,
    dtype: torch.dtype | None,
) -> _Source:
    local = parameter.detach()
    shape = tuple(parameter.shape)
    groups: list[dist.ProcessGroup] = []
    places = [_Place(offset=(0,) * len(shape), shape=shape)]
    # From the outside in: each step splits every place of the step before.
    if group is not None and lengths:
        groups.append(group)
        starts = itertools.accumulate(lengths, initial=0)
        places = [
            _Place(offset=(start, *(0,) * (len(shape) - 1)), shape=(length, *shape[1:]))
            for start, length in zip(starts, lengths, strict=False)  # the last start is the end
        ]
        shape = (sum(lengths), *shape[1:])
    if isinstance(local, DTensor):
        mesh, placements = local.device_mesh, local.placements
        local = local.to_local()
        for mesh_axis, placement in enumerate(placements):
            if isinstance(placement, Replicate) or mesh.size(mesh_axis) == 1:
                continue
            if type(placement) is not Shard:  # a subclass of it may mean another order
                message = (
                    f"gather_full: {name}: expected placements that are Shard or Replicate, "
                    f"got {placements}; redistribute the tensor first"
                )
                raise ValueError(message)
            groups.append(mesh.get_group(mesh_axis))
            places = [
                part
                for place in places
                for part in _split(place, placement.dim, mesh.size(mesh_axis))
            ]
    return _Source(
        name=name,
        local=local,
        dtype=dtype if dtype is not None and local.is_floating_point() else local.dtype,
        device=local.device if device is None else device,
        shape=shape,
        # From the inside out, so that the ranks of the innermost are neighbours among the rows.
        groups=tuple(reversed(groups)),
        places=tuple(places),
    )


def _split(place: _Place, axis: int, num_parts: int) -> Iterator[_Place]:
    """The shards of one tensor as `Shard` cuts them: equal ones, then a shorter one, then none."""
    length = place.shape[axis]
    part = -(-length // num_parts)
    for index in range(num_parts):
        start = min(index * part, length)
        offset, shape = list(place.offset), list(place.shape)
        offset[axis] += start
        shape[axis] = min(part, length - start)
        yield _Place(offset=tuple(offset), shape=tuple(shape))
