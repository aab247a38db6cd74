"""A group of processes in which the first sends bytes to all others: NCCL, or gloo on the CPU.

Not torch's default group, which the trainer and vLLM have for themselves: the group is made
directly, and lives as long as its members stay the same.
"""

import uuid
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore


@final
class BroadcastGroup:
    """One process's place in the group.

    Args:
        rank: 0 is the sender.
        num_members: the sender and its receivers.
        file: a file through which members find each other, on this machine; not there yet.
        device: NCCL for a GPU, gloo for the CPU.
        timeout_s: longest wait for another member, in seconds.
    """

    def __init__(
        self, *, rank: int, num_members: int, file: Path, device: torch.device, timeout_s: float
    ) -> None:
        self.rank = rank
        self.num_members = num_members
        self.file = file
        # a file, since torch's TCP store listens on every address of the machine
        store = FileStore(str(file), num_members)
        timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout  # noqa: SLF001  (the only name that torch 2.10 to 2.14 share)
            self._group = cast(
                "dist.ProcessGroup", dist.ProcessGroupNCCL(store, rank, num_members, options)
            )
        else:
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
            gloo._timeout = timeout  # noqa: SLF001
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
            self._group = cast(
                "dist.ProcessGroup", dist.ProcessGroupGloo(store, rank, num_members, gloo)
            )
        self._works: list[dist.Work | None] = [None, None]

    def broadcast(self, half: int, content: Tensor) -> None:
        """Send, or receive, bytes; on a GPU only enqueued when this returns."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._works[half] = self._group.broadcast([content], options)

    def wait(self, half: int) -> None:
        """Let what comes after this on the present stream (on the CPU: this call) wait for it."""
        work, self._works[half] = self._works[half], None
        if work is not None:
            work.wait()

    def leave(self) -> None:
        """End it, whatever is still on its way."""
        self._works = [None, None]
        self._group.abort()


def new_group_file(folder: Path) -> Path:
    """A file for one group; a group of other members needs another one."""
    return folder / f"group-{uuid.uuid4().hex[:8]}"


def joined_group(described: Mapping[str, object], device: torch.device) -> BroadcastGroup:
    """The group that a sender described."""
    return BroadcastGroup(
        rank=int(cast("int", described["rank"])),
        num_members=int(cast("int", described["num_members"])),
        file=Path(str(described["file"])),
        device=device,
        timeout_s=float(cast("float", described["timeout_s"])),
    )
