"""The receiving half of a stream of weights: from the socket's messages to pieces of tensors."""

import json
import os
import socket
from array import array
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Self, cast, final

import torch
from torch import Tensor

from rollout_vllm.broadcast import BroadcastGroup, joined_group
from rollout_vllm.buckets import checksum, device_name, open_shared, synchronise
from rollout_vllm.copy_plan import Piece
from rollout_vllm.headers import TensorHeader
from rollout_vllm.offered import ANYWHERE
from rollout_vllm.stream_wire import Message, receive_message, send_message
from rollout_vllm.torch_headers import torch_dtype

_FIELDS_PER_PART = 4


class _Bucket(NamedTuple):
    half: int
    content: Tensor
    layout: "array[int]"
    checksum: object


@final
class StreamReceiver:
    """One engine process's end of the streams that it is offered."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # a group outlives an update: joining costs as much as sending
        self._group: BroadcastGroup | None = None

    def receive(self, instructions: Mapping[str, object]) -> "IncomingStream":
        """Meet the sender, and learn what will come; no weight moves yet.

        Raises:
            OSError: if the sender is gone or does not answer in time.
        """
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(float(cast("float", instructions["timeout_s"])))
        try:
            connection.connect(self._sender(instructions))
            group = self._group
            hello = {
                "process": os.getpid(),
                "device": device_name(self._device),
                "group": None if group is None else str(group.file),
                "rank": None if group is None else group.rank,
            }
            send_message(connection, "hello", hello)
            update = receive_message(connection, "update")
            return IncomingStream(
                connection, update, self._memory(update), self._group, self._device
            )
        except BaseException:
            connection.close()
            raise

    def _sender(self, instructions: Mapping[str, object]) -> str:
        sockets = cast("Mapping[str, str]", instructions["sockets"])
        here = device_name(self._device)
        if here not in sockets and ANYWHERE not in sockets:
            raise ConnectionError(
                f"weights: this engine process runs on {here}, senders wait on "
                f"{', '.join(sockets)}; give WeightStream the engine's device, or "
                'carriage="broadcast"'
            )
        return sockets.get(here, sockets.get(ANYWHERE, ""))

    def _memory(self, update: Message) -> Tensor:
        fields = update.fields
        if fields["carrier"] == "shared":
            return open_shared(cast("Mapping[str, object]", fields["memory"]), self._device)
        described = cast("Mapping[str, object]", fields["group"])
        if self._group is None or str(self._group.file) != described["file"]:
            self.close()
            self._group = joined_group(described, self._device)
        num_bytes = 2 * int(cast("int", fields["half_bytes"]))
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def close(self) -> None:
        """Leave the group, if any; may be called twice."""
        if self._group is not None:
            self._group.leave()
            self._group = None


@final
class IncomingStream:
    """One version of the weights on its way. Use as a context: it tells the sender how it went."""

    def __init__(
        self,
        connection: socket.socket,
        update: Message,
        memory: Tensor,
        group: BroadcastGroup | None,
        device: torch.device,
    ) -> None:
        self._connection = connection
        self._memory: Tensor | None = memory
        self._half_bytes = int(cast("int", update.fields["half_bytes"]))
        self._group = group if update.fields["carrier"] == "broadcast" else None
        self._device = device
        self.tensors: dict[str, TensorHeader] = {
            name: TensorHeader(dtype, tuple(shape))
            for name, dtype, shape in json.loads(update.payload)
        }
        self._names = list(self.tensors)

    def __enter__(self) -> Self:
        """The stream itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close what was opened, and tell the sender."""
        self._memory = None
        if self._device.type == "cuda":
            # closes the sender's memory, so that the sender can have it back
            torch.cuda.ipc_collect()
        try:
            if error is None:
                send_message(self._connection, "ended", {})
            else:
                send_message(self._connection, "failed", {"reason": str(error)})
        except OSError:
            if error is None:
                raise
        finally:
            self._connection.close()

    def refuse(self, reason: str) -> None:
        """Take nothing, and tell the sender why."""
        self.__exit__(ConnectionError, ConnectionError(reason), None)

    def buckets(self) -> Iterator[list[Piece]]:
        """The pieces of one bucket after the other.

        They lie in memory that is used again once the next are asked for.

        Raises:
            ConnectionError: if the sender failed or went away.
            ValueError: if a bucket's checksum is not the sender's.
        """
        coming = self._next()
        while coming is not None:
            bucket = coming
            # a broadcast of the next half runs while this one is loaded; shared memory has nothing
            # to run, and its sender fills the next half meanwhile
            ahead = self._group is not None
            coming = self._next() if ahead else None
            if self._group is not None:
                self._group.wait(bucket.half)
            if bucket.checksum is not None:
                self._compare(bucket)
            yield self._pieces(bucket)
            synchronise(self._device)
            send_message(self._connection, "done", {"half": bucket.half})
            if not ahead:
                coming = self._next()

    def _next(self) -> _Bucket | None:
        message = receive_message(self._connection, "bucket", "end")
        if message.kind == "end":
            return None
        if self._memory is None:
            raise RuntimeError("IncomingStream.buckets: expected it inside the context")
        half, used = (int(cast("int", message.fields[name])) for name in ("half", "used"))
        begin = half * self._half_bytes
        layout = array("q")
        layout.frombytes(message.payload)
        content = self._memory[begin : begin + used]
        if self._group is not None:
            self._group.broadcast(half, content)
        return _Bucket(half, content, layout, message.fields["checksum"])

    def _compare(self, bucket: _Bucket) -> None:
        found = checksum(bucket.content)
        if found != bucket.checksum:
            raise ValueError(
                f"weights: a bucket of {bucket.content.numel()} bytes changed on its way: checksum "
                f"{bucket.checksum} was sent, {found} came"
            )

    def _pieces(self, bucket: _Bucket) -> list[Piece]:
        pieces: list[Piece] = []
        layout = bucket.layout
        for place in range(0, len(layout), _FIELDS_PER_PART):
            number, offset, start, count = layout[place : place + _FIELDS_PER_PART]
            name = self._names[number]
            header = self.tensors[name]
            dtype = torch_dtype(header.dtype)
            shape = (count, *header.shape[1:]) if header.shape else ()
            numel = 1
            for length in shape:
                numel *= length
            end = offset + numel * dtype.itemsize
            rows = bucket.content[offset:end].view(dtype).view(shape)
            pieces.append(Piece(name, rows, start, header.shape[0] if header.shape else 1))
        return pieces
