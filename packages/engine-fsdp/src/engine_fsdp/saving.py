"""A checkpoint being written: all ranks together, in the foreground or behind the next steps.

::

    begin    the folder's name is free ── .NAME.unfinished is made ── state is copied to the host
    write    every rank writes its file ── all are done ── one rename to NAME        (a thread)
    wait     the error of any rank, on every rank

What the ranks say to each other goes over a gloo group of their own, so that a thread's words do
not get between the collectives of a step.
"""

import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, final

import torch
import torch.distributed as dist

from engine_fsdp.checkpoint import Shard, write_file

ValueT = TypeVar("ValueT")


@final
class PendingCheckpoint:
    """A checkpoint that is written in the background, and then appears by one rename."""

    def __init__(self, folder: Path, shards: Mapping[str, Shard], group: dist.ProcessGroup) -> None:
        """Begin to write; called on every rank, after `prepare_folder`.

        Args:
            folder: where it is to appear.
            shards: what this rank writes; not changed by anyone until it is written.
            group: of all ranks, used by nothing else until this checkpoint is written.
        """
        self.folder = folder
        self._error: BaseException | None = None
        # No daemon: a process that ends waits for it, since a checkpoint is asked for to last.
        self._thread = threading.Thread(
            target=self._write, args=(dict(shards), group), name=f"checkpoint {folder.name}"
        )
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank is through with it, well or not; waits for nothing."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return once the folder is there.

        Raises:
            OSError: on every rank, if one could not write its part; no folder appears.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _write(self, shards: dict[str, Shard], group: dist.ProcessGroup) -> None:
        try:
            write_folder(self.folder, shards, group)
        except BaseException as error:  # noqa: BLE001  # it is raised by `wait`
            self._error = error
        finally:
            shards.clear()  # the copy on the host is as large as the state


def staged(shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """Copies in host memory, which the steps to come do not write to."""
    copies: dict[str, Shard] = {}
    devices: set[torch.device] = set()
    for name, shard in shards.items():
        source = shard.tensor
        # Only from pinned memory does a device copy while the host goes on to the next tensor.
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type != "cpu")
        copies[name] = Shard(tensor=copy.copy_(source, non_blocking=True), offset=shard.offset)
        devices.add(source.device)
    for device in devices:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
    return copies


def prepare_folder(folder: Path, group: dist.ProcessGroup) -> None:
    """See that the name is free, and make the folder to write into. Called on every rank.

    Raises:
        FileExistsError: on every rank, if the folder exists.
        OSError: on every rank, if rank 0 cannot make the folder.
    """
    if any(_from_all(folder.exists(), group)):
        message = f"{folder}: expected a new folder, but it exists; give another name"
        raise FileExistsError(message)
    unfinished = _unfinished(folder)
    with _together(folder, group):
        if dist.get_rank() == 0:
            if unfinished.exists():
                shutil.rmtree(unfinished)  # what a killed run left
            unfinished.mkdir(parents=True)


def write_folder(folder: Path, shards: Mapping[str, Shard], group: dist.ProcessGroup) -> None:
    """Write all parts and make the folder appear. Called on every rank, after `prepare_folder`.

    Raises:
        OSError: on every rank, if one could not write its part; nothing is left of it then.
    """
    unfinished = _unfinished(folder)
    try:
        with _together(folder, group):
            write_file(shards, unfinished)
        with _together(folder, group):
            if dist.get_rank() == 0:
                _sync_folder(unfinished)
                unfinished.rename(folder)
                _sync_folder(folder.parent)
    finally:
        if dist.get_rank() == 0 and unfinished.exists():
            shutil.rmtree(unfinished, ignore_errors=True)  # the disk may be full because of it


def _sync_folder(folder: Path) -> None:
    """See that the names in it outlive a power cut, as the bytes of its files do."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unfinished(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.unfinished")


@contextmanager
def _together(folder: Path, group: dist.ProcessGroup) -> Iterator[None]:
    """Ends on all ranks at once, with an error on all of them if there is one on any."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as own:  # noqa: BLE001  # raised below, when the others know
        error = own
    texts = _from_all(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None and not isinstance(error, Exception):
        raise error  # an interrupt stays one
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
    if failed:
        message = (
            f"{folder}: cannot be written, and does not appear; see to the cause and save again: "
            f"{'; '.join(failed)}"
        )
        raise OSError(message) from error


def _from_all(value: ValueT, group: dist.ProcessGroup) -> list[ValueT]:
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
