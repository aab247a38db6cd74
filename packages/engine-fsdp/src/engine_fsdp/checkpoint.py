"""Checkpoints through torch.distributed.checkpoint, in safetensors files: nothing is unpickled.

torch's default storage pickles its metadata and reads it with `pickle.load` (torch 2.13,
checkpoint/filesystem.py), so its safetensors storage is used, and the state is tensors alone.
torch.distributed.checkpoint is imported on use: it takes seconds to import.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rl_contracts.shared_folder import new_folder


def random_states(device: torch.device) -> dict[str, Tensor]:
    """States of torch's generators that this rank draws from, each rank under its own names."""
    states = {f"random.cpu.{dist.get_rank()}": torch.get_rng_state()}
    if device.type != "cpu":
        states[f"random.{device.type}.{dist.get_rank()}"] = torch.get_device_module(
            device
        ).get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Take back what `random_states` returned."""
    torch.set_rng_state(states[f"random.cpu.{dist.get_rank()}"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(
            states[f"random.{device.type}.{dist.get_rank()}"], device
        )


def write_tensors(state: Mapping[str, Tensor], folder: Path) -> None:
    """Write all ranks' tensors into a new folder, which appears by one rename.

    Raises:
        FileExistsError: if the folder exists, on every rank.
        OSError: on every rank, if a rank could not write its part; no folder appears.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

    what = f"{folder}: cannot be written, and does not appear; see to the cause and save again"
    with new_folder(folder) as unfinished, _named_failures(what):
        save(
            dict(state),
            storage_writer=HuggingFaceStorageWriter(str(unfinished), save_distributed=True),
        )


def read_tensors(state: Mapping[str, Tensor], folder: Path) -> None:
    """Read into the tensors of `state`, in place.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if it holds other tensors; says which.
        OSError: on every rank, if a rank could not read its part. The tensors of `state` then hold
            some of it.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

    if not any(folder.glob("*.safetensors")):
        message = f"{folder}: there is no checkpoint, which would hold *.safetensors"
        raise FileNotFoundError(message)
    reader = HuggingFaceStorageReader(str(folder))
    stored = {
        name: tuple(entry.size)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    ranks = {name for name in stored if name.startswith("random.cpu.")}
    if len(ranks) != dist.get_world_size():
        message = (
            f"{folder}: the checkpoint was written by {len(ranks)} ranks, this run has "
            f"{dist.get_world_size()}; resume on as many"
        )
        raise ValueError(message)
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    differing = sorted(name for name, shape in wanted.items() if stored.get(name) != shape)
    left_over = sorted(
        name for name in stored.keys() - wanted.keys() if not re.match(r"random\.", name)
    )
    if differing or left_over:
        name = (differing or left_over)[0]
        message = (
            f"{folder}: the checkpoint is of another model: {len(differing)} tensors differ and "
            f"{len(left_over)} are left over; {name} has shape {stored.get(name)} there and "
            f"{wanted.get(name)} here"
        )
        raise ValueError(message)
    with _named_failures(f"{folder}: cannot be read; build a new engine before going on"):
        load(dict(state), storage_reader=reader)


@contextmanager
def _named_failures(what: str) -> Iterator[None]:
    """Turn torch's CheckpointException, which is no `Exception`, into an OSError with its causes.

    torch wraps in it whatever a rank raised and raises it on all of them; an interrupt stays one.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415

    try:
        yield
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        for cause in causes.values():
            if not isinstance(cause, Exception):
                raise cause from error
        texts = (f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
        message = f"{what}: {'; '.join(texts)}"
        raise OSError(message) from error
