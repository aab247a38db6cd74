"""The file format of checkpoints: safetensors alone, so that nothing is ever unpickled.

    <folder>/rank-00000.safetensors   what rank 0 writes: its shards, what all ranks hold
    <folder>/rank-00001.safetensors   what rank 1 writes: its shards, its random states

The files are those of torch.distributed.checkpoint's safetensors storage (torch 2.13,
checkpoint/hf_storage.py): each says in its metadata where its shards begin in the whole tensors.
torch reads them, onto any number of ranks. They are written here, straight from the tensors:
torch's writer makes a copy of all of them first, and a pickle in its default format.
torch.distributed.checkpoint is imported on use: it takes seconds to import.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor

RANDOM_PREFIX: Final = "random."
"""Begins the names of random states, each of which belongs to one rank."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A part of a tensor that this rank writes."""

    tensor: Tensor
    """The part."""

    offset: tuple[int, ...]
    """Where it begins in the whole tensor."""


def shards_to_write(state: Mapping[str, Tensor]) -> dict[str, Shard]:
    """What this rank writes of `state`, which all ranks hold under the same names.

    Of a sharded tensor its own part, if it has any; the copies of HSDP take turns from tensor to
    tensor, so that each writes its share. A tensor that every rank holds whole is written by rank
    0, a random state by every rank.
    """
    found: dict[str, Shard] = {}
    for index, (name, tensor) in enumerate(state.items()):
        local, offset, copy, num_copies = _place(tensor.detach())
        is_own = copy == index % num_copies or name.startswith(RANDOM_PREFIX)
        if is_own and local.numel():
            found[name] = Shard(tensor=local, offset=offset)
    return found


def _place(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], int, int]:
    """This rank's part, where it begins, and which of how many equal copies it is."""
    from torch.distributed.tensor import DTensor, Replicate, Shard as Sharded  # noqa: PLC0415

    if not isinstance(tensor, DTensor):
        # Rank 0 alone writes it: any other rank is a copy whose turn never comes.
        return tensor, (0,) * tensor.ndim, dist.get_rank(), 1
    mesh, local = tensor.device_mesh, tensor.to_local()
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    copy, num_copies = 0, 1
    for axis, placement in enumerate(tensor.placements):
        size, coordinate = mesh.size(axis), mesh.get_local_rank(axis)
        if isinstance(placement, Replicate):
            copy, num_copies = copy * size + coordinate, num_copies * size
        elif type(placement) is Sharded:  # a subclass of it may mean another order
            part = -(-shape[placement.dim] // size)
            start = min(coordinate * part, shape[placement.dim])
            offset[placement.dim] += start
            shape[placement.dim] = min(part, shape[placement.dim] - start)
        else:
            message = f"expected shards and copies, got a tensor placed as {tensor.placements}"
            raise ValueError(message)
    return local, tuple(offset), copy, num_copies


def write_file(shards: Mapping[str, Shard], folder: Path) -> None:
    """Write this rank's file; its bytes are on the disk when this returns.

    Raises:
        OSError: if the file cannot be written.
    """
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    places = {name: {"saved_offsets": list(shard.offset)} for name, shard in shards.items()}
    path = folder / _file_name(dist.get_rank())
    try:
        save_file(
            {name: shard.tensor.cpu().contiguous() for name, shard in shards.items()},
            path,
            metadata={
                "format": "pt",
                "DCP_VERSION": "1.0",
                "DCP_SHARDING_INFO": json.dumps(places),
                "world_size": str(dist.get_world_size()),
            },
        )
    except SafetensorError as error:  # how safetensors passes on what the system said
        raise OSError(str(error)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def random_states(device: torch.device) -> dict[str, Tensor]:
    """States of torch's generators that this rank draws from, each rank under its own names."""
    states = {_random_name("cpu", dist.get_rank()): torch.get_rng_state()}
    if device.type != "cpu":
        states[_random_name(device.type, dist.get_rank())] = torch.get_device_module(
            device
        ).get_rng_state(device)
    return states


def _random_name(device_type: str, rank: int) -> str:
    return f"{RANDOM_PREFIX}{device_type}.{rank}"


def read_tensor(name: str, folder: Path) -> Tensor:
    """One tensor that every rank held whole.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if it lacks the file of a rank, or has no such tensor.
        OSError: if it cannot be read.
    """
    from safetensors import safe_open  # noqa: PLC0415

    _number_of_writers(folder)
    with _named_failures(folder), safe_open(folder / _file_name(0), framework="pt") as file:
        if name not in file.keys():  # noqa: SIM118 - no mapping
            message = f"{folder}: the checkpoint is of another model: it has no tensor {name!r}"
            raise ValueError(message)
        tensor: Tensor = file.get_tensor(name)
    return tensor


def read_state(state: Mapping[str, Tensor], folder: Path, *, device: torch.device) -> None:
    """Read into the tensors of `state`, in place, and set this rank's random states.

    On as many ranks as wrote the checkpoint, each gets its own random states back. On another
    number no rank can go on with its own: each then begins with a seed made from the state of rank
    0 and its own number, other ones on every rank and the same ones each time.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if it lacks the file of a rank, or is of another model; says which.
        OSError: on every rank, if a rank could not read its part. The tensors of `state` then hold
            some of it.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

    num_writers = _number_of_writers(folder)
    with _named_failures(folder):
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    stored = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    _check_same_model(state, stored, folder)
    is_same_number = num_writers == dist.get_world_size()
    names = random_states(device).keys() if is_same_number else (_random_name("cpu", 0),)
    random = {
        name: torch.empty(stored[name], dtype=torch.uint8) for name in names if name in stored
    }
    with _named_failures(folder):
        load({**state, **random}, storage_reader=HuggingFaceStorageReader(str(folder)))
    if is_same_number:
        for name, value in random.items():
            is_cpu = name == _random_name("cpu", dist.get_rank())
            if is_cpu:
                torch.set_rng_state(value)
            else:
                torch.get_device_module(device).set_rng_state(value, device)
    else:
        torch.manual_seed(_seed_of(*random.values(), rank=dist.get_rank()))  # of all devices


def _seed_of(state: Tensor, *, rank: int) -> int:
    """A seed for one of another number of ranks."""
    digest = hashlib.blake2b(state.numpy().tobytes() + rank.to_bytes(8), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _number_of_writers(folder: Path) -> int:
    """Ranks that wrote a checkpoint, whose files are all there.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if a file is missing, or too many are there.
        OSError: if the first file cannot be read.
    """
    from safetensors import safe_open  # noqa: PLC0415

    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if not found:
        message = f"{folder}: there is no checkpoint, which would hold {_file_name(0)}"
        raise FileNotFoundError(message)
    with _named_failures(folder), safe_open(folder / found[0], framework="pt") as first:
        num_writers = int((first.metadata() or {}).get("world_size", 0))
    wanted = [_file_name(rank) for rank in range(num_writers)]
    if found != wanted:
        message = (
            f"{folder}: the checkpoint is not whole: expected the files of {num_writers} ranks "
            f"({', '.join(wanted)}), got {', '.join(found)}"
        )
        raise ValueError(message)
    return num_writers


def _check_same_model(
    state: Mapping[str, Tensor], stored: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    """Refuse other names and shapes."""
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    found = {name: shape for name, shape in stored.items() if not name.startswith(RANDOM_PREFIX)}
    differing = sorted(name for name, shape in wanted.items() if found.get(name) != shape)
    left_over = sorted(found.keys() - wanted.keys())
    if differing or left_over:
        name = (differing or left_over)[0]
        message = (
            f"{folder}: the checkpoint is of another model: {len(differing)} tensors differ and "
            f"{len(left_over)} are left over; {name} has shape {found.get(name)} there and "
            f"{wanted.get(name)} here"
        )
        raise ValueError(message)


@contextmanager
def _named_failures(folder: Path) -> Iterator[None]:
    """Name the folder in what goes wrong with its files.

    torch wraps what a rank raised into a CheckpointException, which is no `Exception`, and raises
    it on all ranks; an interrupt stays one.
    """
    from safetensors import SafetensorError  # noqa: PLC0415
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415

    what = f"{folder}: cannot be read; build a new engine before going on"
    try:
        yield
    except SafetensorError as error:
        message = f"{what}: {error}"
        raise OSError(message) from error
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        for cause in causes.values():
            if not isinstance(cause, Exception):
                raise cause from error
        texts = (f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
        message = f"{what}: {'; '.join(texts)}"
        raise OSError(message) from error
