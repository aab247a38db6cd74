"""How the halves of a bucket get from the sender to its receivers.

==========  ==============================================  =======================================
carrier     the bucket                                      a half is free again when
==========  ==============================================  =======================================
shared      is the sender's, and every receiver opens it:   every receiver said that it has loaded
            CUDA IPC on one GPU, mapped memory on the CPU   what lay in it
broadcast   exists on each side, filled by a collective:    the same
            NCCL between GPUs, gloo between CPU processes
==========  ==============================================  =======================================
"""

import socket
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, final

import torch
from torch import Tensor

from rollout_vllm.broadcast import BroadcastGroup
from rollout_vllm.buckets import checksum, forget_name, handle_of, make_shared, synchronise
from rollout_vllm.stream_wire import receive_message, send_message


class Carrier(Protocol):
    """The sender's side of it."""

    @property
    def memory(self) -> Tensor:
        """Both halves, as bytes."""

    def hand_over(self, half: int, used: int, layout: "array[int]") -> None:
        """Give the first `used` bytes of a half to every receiver."""

    def wait(self, half: int) -> None:
        """Return when the half may be written again."""

    def end(self) -> None:
        """Say that nothing more comes."""


def _announce(
    connections: Sequence[socket.socket],
    half: int,
    content: Tensor,
    layout: "array[int]",
    *,
    checksums: bool,
) -> None:
    fields = {
        "half": half,
        "used": content.numel(),
        "checksum": checksum(content) if checksums else None,
    }
    for connection in connections:
        send_message(connection, "bucket", fields, layout.tobytes())


@final
class SharedCarrier:
    """The bucket is the sender's, and every receiver opens it."""

    def __init__(
        self,
        connections: Sequence[socket.socket],
        *,
        half_bytes: int,
        device: torch.device,
        folder: Path,
        checksums: bool,
    ) -> None:
        self.memory = make_shared(2 * half_bytes, device, folder)
        self._connections = connections
        self._half_bytes = half_bytes
        self._folder = folder
        self._checksums = checksums
        self._given = [False, False]

    def describe(self) -> dict[str, object]:
        """A handle of the memory; a new one for each receiver, since torch counts who opens it."""
        return {"carrier": "shared", "memory": handle_of(self.memory, self._folder)}

    def hand_over(self, half: int, used: int, layout: "array[int]") -> None:
        """Say where what lies."""
        begin = half * self._half_bytes
        # the other process reads as soon as it is told, and its GPU queue knows nothing of ours
        synchronise(self.memory.device)
        content = self.memory[begin : begin + used]
        _announce(self._connections, half, content, layout, checksums=self._checksums)
        self._given[half] = True

    def wait(self, half: int) -> None:
        """Wait for every receiver's word."""
        if self._given[half]:
            for connection in self._connections:
                receive_message(connection, "done")
            self._given[half] = False
            forget_name(self._folder)

    def end(self) -> None:
        """Say so to every receiver."""
        _end(self._connections)


@final
class BroadcastCarrier:
    """A bucket of its own on each side, filled by a collective."""

    def __init__(
        self,
        connections: Sequence[socket.socket],
        group: BroadcastGroup,
        *,
        half_bytes: int,
        device: torch.device,
        checksums: bool,
    ) -> None:
        self.memory = torch.empty(2 * half_bytes, dtype=torch.uint8, device=device)
        self._connections = connections
        self._group = group
        self._half_bytes = half_bytes
        self._checksums = checksums
        self._given = [False, False]

    def hand_over(self, half: int, used: int, layout: "array[int]") -> None:
        """Say what comes, and send it."""
        begin = half * self._half_bytes
        content = self.memory[begin : begin + used]
        _announce(self._connections, half, content, layout, checksums=self._checksums)
        self._group.broadcast(half, content)
        self._given[half] = True

    def wait(self, half: int) -> None:
        """Wait for every receiver's word: it tells a receiver that died from one that is slow."""
        if self._given[half]:
            for connection in self._connections:
                receive_message(connection, "done")
            self._group.wait(half)
            self._given[half] = False

    def end(self) -> None:
        """Say so to every receiver."""
        _end(self._connections)


def _end(connections: Sequence[socket.socket]) -> None:
    for connection in connections:
        send_message(connection, "end", {})
