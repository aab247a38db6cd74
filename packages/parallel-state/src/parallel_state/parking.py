"""Device memory given away for a while, and taken back: for a sampler on the same device.

Tensors stay the objects that they are: only the memory behind them goes and comes back, so that
whoever holds a view of it (FSDP2's flat shards, an optimizer's moments) need not be told.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_LARGEST_SLAB: Final = 2**30
_SMALLEST_SLAB: Final = 2**20
_ALIGNMENT: Final = 256
"""Bytes; the copy of every storage begins at a multiple of it."""


@final
class Parked:
    """Copies in host memory of what some tensors held, whose own memory is free meanwhile.

    Torch rounds every block of pinned memory up to a power of two (2.13, CachingHostAllocator.h).
    So the copies lie one after the other in slabs of such sizes, and where one does not fit into
    the rest of a slab it goes on in the next.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Copy and free; tensors that share memory are copied once.

        Args:
            tensors: all that view the memory that is to be freed may go on viewing it, but nobody
                may read them until `restore`.
        """
        # by address: parameters, and FSDP2's flat shards below them, share their memory
        storages = {
            storage.data_ptr(): storage
            for storage in (_local(tensor).untyped_storage() for tensor in tensors)
            if storage.nbytes()
        }
        self._storages = tuple(storages.values())
        self._copies = _room_for(
            [storage.nbytes() for storage in self._storages],
            pinned=any(storage.device.type != "cpu" for storage in self._storages),
        )
        for storage, pieces in zip(self._storages, self._copies, strict=True):
            for piece, part in zip(pieces, _parts_of(storage, pieces), strict=True):
                piece.copy_(part, non_blocking=True)
        self._synchronize()  # the copies are whole before their source goes
        for storage in self._storages:
            storage.resize_(0)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies in host memory."""
        return sum(map(_size_of, self._copies))

    def restore(self) -> None:
        """Take the memory back and fill it. Once."""
        for storage, pieces in zip(self._storages, self._copies, strict=True):
            storage.resize_(_size_of(pieces))
            for piece, part in zip(pieces, _parts_of(storage, pieces), strict=True):
                part.copy_(piece, non_blocking=True)
        self._synchronize()  # the copies may go when this returns
        self._copies = ()

    def _synchronize(self) -> None:
        for device in {storage.device for storage in self._storages}:
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)


def held_by(
    model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> Iterator[Tensor]:
    """What is resident between two steps: parameters, and the state of their optimizers."""
    yield from model.parameters()
    for optimizer in optimizers:
        for state in optimizer.state.values():
            # the counts of steps are scalars, and stay
            yield from (
                value for value in state.values() if isinstance(value, Tensor) and value.ndim
            )


def park(tensors: Iterable[Tensor], device: torch.device) -> Parked:
    """Free the memory of these tensors, for other processes too."""
    parked = Parked(tensors)
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    return parked


def unpark(method: str, parked: Parked | None) -> None:
    """Take it back.

    Raises:
        RuntimeError: if there is nothing to take back.
    """
    if parked is None:
        message = f"{method}: the weights are on the device; to_host moves them away"
        raise RuntimeError(message)
    parked.restore()


def require_parkable(
    method: str, parked: Parked | None, device: torch.device, *, offload: str
) -> None:
    """Refuse where there is nothing to move.

    Raises:
        RuntimeError: if it was moved already.
        ValueError: if weights are kept in host memory in any case.
    """
    if parked is not None:
        message = f"{method}: the weights are in host memory already; call to_device first"
        raise RuntimeError(message)
    if device.type == "cpu" or offload != "none":
        why = f"the device is {device}" if device.type == "cpu" else f"offload = {offload!r}"
        message = (
            f"{method}: the weights are kept in host memory in any case, since {why}: there is no "
            "device memory to free; leave the call out"
        )
        raise ValueError(message)


def require_on_device(method: str, parked: Parked | None) -> None:
    """Refuse to compute with weights that are not there.

    Raises:
        RuntimeError: if they are in host memory.
    """
    if parked is not None:
        message = f"{method}: the weights are in host memory; call to_device first"
        raise RuntimeError(message)


def _local(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    if isinstance(detached, DTensor):
        local: Tensor = detached.to_local()
        return local
    return detached


def _slab_sizes(num_bytes: int) -> Iterator[int]:
    """Powers of two that add up to `num_bytes`, but for less than the smallest slab."""
    while num_bytes > 0:
        size = min(_LARGEST_SLAB, max(_SMALLEST_SLAB, 2 ** (num_bytes.bit_length() - 1)))
        yield size
        num_bytes -= size


def _room_for(sizes: Sequence[int], *, pinned: bool) -> tuple[tuple[Tensor, ...], ...]:
    """Pieces of host memory, one after the other, that have these sizes in bytes together."""
    slabs = [
        torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        for size in _slab_sizes(sum(map(_aligned, sizes)))
    ]
    rest = torch.empty(0, dtype=torch.uint8)
    rooms = []
    for size in sizes:
        pieces: list[Tensor] = []
        while (missing := size - _size_of(pieces)) > 0:
            if not rest.numel():
                rest = slabs.pop(0)
            pieces.append(rest[:missing])
            rest = rest[_aligned(pieces[-1].numel()) :]
        rooms.append(tuple(pieces))
    return tuple(rooms)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _size_of(pieces: Sequence[Tensor]) -> int:
    return sum(piece.numel() for piece in pieces)


def _parts_of(storage: torch.UntypedStorage, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of a storage, as bytes, as long as the pieces of its copy."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    parts: Sequence[Tensor] = whole.split([piece.numel() for piece in pieces])
    return parts
