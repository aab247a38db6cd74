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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_state.agreement import all_gather_single
from parallel_state.shards import Source, read_request, read_sources

_ALIGNMENT = 16
"""Bytes; the largest element (complex128), so that any type may start at a multiple of it."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Segment:
    """Elements `start` to `stop` of every rank's shard of a parameter, and where in the chunk."""

    source: Source
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
    iterator to its end: one that stops leaves the others waiting for the timeout of the group.

    Args:
        params: names and parameters, as of `Module.named_parameters`; the same ones in the same
            order on every rank, which is checked. Only references are kept.
        group: ranks that hold further slices along axis 0, in their order, beyond what the DTensors
            know: the group of `ep` for experts that are plain tensors, or DTensors on `ep_fsdp`.
            The slices may differ in length. None for parameters that are no such slices.
        max_bytes: memory for chunks on their way, in bytes. On gloo that includes its own copy.
        device: where chunks travel and whole tensors arrive; the device type of the groups.
            None: where each shard is.
        dtype: type that floating-point parameters are cast to before they travel. None: their own.

    Raises:
        TypeError: if an argument has another type, such as a dict where its items belong, or a
            group that this rank is not in.
        ValueError: on all ranks that share a group, before anything of the parameters travels: if
            `max_bytes` is too small for a chunk, a placement is neither `Shard` nor `Replicate`, a
            shard has another shape than its placement says, or no data, `group` has ranks that a
            DTensor is sharded over already, or the ranks differ in what they bring.
    """
    request = read_request(params, group, max_bytes, device=device, dtype=dtype)
    problems = [
        _budget_problem(request.groups(parameter)[::-1], max_bytes)
        for _, parameter in request.named
    ]
    return _gather(read_sources(request, problems), max_bytes)


def _gather(sources: Sequence[Source], max_bytes: int) -> Iterator[tuple[str, Tensor]]:
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
        if row_bytes:  # nothing travels for tensors without elements
            all_gather_single(received, packed, group=group)
        packed = received
    return packed.view(math.prod(map(dist.get_world_size, groups)), row_bytes)


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


def _chunks(sources: Iterable[Source], chunk_bytes: int) -> Iterator[list[_Segment]]:
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
    return max_bytes // _parts(groups) // _ALIGNMENT * _ALIGNMENT


def _parts(groups: Sequence[dist.ProcessGroup]) -> int:
    """How often a rank's part of a chunk is in memory at once."""
    sizes = [dist.get_world_size(group) for group in groups]
    # The last hop is the largest: what it sends, what it receives, and what gloo receives into
    # (ProcessGroupGloo's all-gather fills one flat tensor of its own and copies it out).
    return math.prod(sizes[:-1]) + 2 * math.prod(sizes)


def _budget_problem(groups: Sequence[dist.ProcessGroup], max_bytes: int) -> str | None:
    """Why a budget is too small, if it is."""
    if _chunk_bytes(groups, max_bytes) > 0:
        return None
    sizes = " * ".join(str(dist.get_world_size(group)) for group in groups) or "1"
    return (
        f"gather_full: max_bytes: expected at least {_ALIGNMENT * _parts(groups)} for groups of "
        f"{sizes} ranks, got {max_bytes}"
    )
