"""The sending half of the streamed weight transfer; needs torch, and no vLLM.

::

    WeightStream(tensors, ...)        once
    offer(version)                    ── OfferedWeights (small) ──▶ VllmSampler.load_published
    send(engine.export_weights())     meanwhile, in another thread or process

    export, cast ──▶ half A │ half B ──▶ the engine copies from one half while the other is filled

The weights never exist twice: what is needed beside them is the bucket, in two halves.
"""

import contextlib
import json
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self, final

import attrs
import torch
from torch import Tensor

from rl_contracts.rollout import PolicyVersion
from rollout_vllm.broadcast import BroadcastGroup, new_group_file
from rollout_vllm.bucket_filling import ALIGNMENT, BucketFilling
from rollout_vllm.buckets import device_name
from rollout_vllm.carriers import BroadcastCarrier, Carrier, SharedCarrier
from rollout_vllm.config import Dtype
from rollout_vllm.headers import TensorHeader
from rollout_vllm.offered import ANYWHERE, OfferedWeights
from rollout_vllm.stream_wire import Message, receive_message, send_message
from rollout_vllm.torch_headers import as_sent, torch_dtype

BUCKET_BYTES = 2**30
"""Of both halves: large enough that handing over costs nothing."""

Carriage = Literal["shared", "broadcast"]
"""How bytes move: through memory that both sides open, or by a collective between them."""


@attrs.frozen(kw_only=True)
class StreamReport:
    """What one `send` did."""

    num_bytes: int
    """Bytes of all weights."""

    num_buckets: int
    """Halves of the bucket that were handed over."""

    seconds: float
    """From the first receiver's arrival to the last one's last word."""

    waited_s: float
    """Of these, the time in which the sender could only wait for receivers."""


class _Offer(NamedTuple):
    """What was offered, and where its receivers come to."""

    version: PolicyVersion
    path: Path
    listener: socket.socket


class _Peer(NamedTuple):
    """A receiver that has come."""

    connection: socket.socket
    hello: Mapping[str, object]


@final
class WeightStream:
    """Sends weights to engines on this machine, version after version.

    Args:
        tensors: names and shapes of what every `send` will send: `tensor_headers` of one export.
        dtype: the sampler's type; floating-point weights are cast to it.
        device: where the bucket lies. With `shared` it is the engine's own device.
        carriage: `shared` for an engine on the same GPU (CUDA IPC) or on the CPU; `broadcast` for
            engines on other GPUs (NCCL), or on the CPU (gloo).
        bucket_bytes: both halves together, and all the memory that a transfer needs beside the
            weights, on each side of a broadcast.
        timeout_s: longest wait for a receiver, in seconds.
        checksums: let receivers compare a checksum of every bucket before they use it; for
            finding faults, since it reads every byte twice more.
        folder: where the stream makes a private folder for its socket and, on the CPU, the bucket.
            Default: shared memory on the CPU, else the place for temporary files.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorHeader],
        *,
        dtype: Dtype,
        device: torch.device,
        carriage: Carriage = "shared",
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 600.0,
        checksums: bool = False,
        folder: Path | None = None,
    ) -> None:
        self._tensors = as_sent(tensors, dtype=dtype)
        self._numbers = {name: number for number, name in enumerate(tensors)}
        self._dtype: Dtype = dtype
        self._device = device
        self._carriage: Carriage = carriage
        self._half_bytes = bucket_bytes // 2 // ALIGNMENT * ALIGNMENT
        self._timeout_s = timeout_s
        self._checksums = checksums
        self._check()
        where = folder or _folder_for(device)
        self._folder = Path(tempfile.mkdtemp(prefix="rollout-vllm-", dir=where))
        self._num_offers = 0
        self._offered: _Offer | None = None
        self._group: BroadcastGroup | None = None

    def __enter__(self) -> Self:
        """The stream itself."""
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Leave the group and remove the socket; may be called twice."""
        self._leave_group()
        self._take_back()
        shutil.rmtree(self._folder, ignore_errors=not self._folder.exists())

    def offer(self, version: PolicyVersion) -> OfferedWeights:
        """What a sampler needs to take this version, while `send` sends it.

        An offer before it that was not sent holds no more.

        Raises:
            ValueError: if the version is below 0.
        """
        if version < 0:
            raise ValueError(f"WeightStream.offer: expected a version of 0 or more, got {version}")
        self._take_back()
        self._num_offers += 1
        # whoever answers an offer late finds nobody, instead of being taken for an answer to this
        path = self._folder / f"offer-{self._num_offers}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        self._offered = _Offer(version, path, listener)
        where = device_name(self._device) if self._carriage == "shared" else ANYWHERE
        return OfferedWeights(
            version=version,
            dtype=self._dtype,
            headers=self._tensors,
            sockets={where: path},
            timeout_s=self._timeout_s,
        )

    def send(
        self, weights: Iterable[tuple[str, Tensor]], *, num_receivers: int = 1
    ) -> StreamReport:
        """Send the version that was offered last; returns when every receiver has all of it.

        Args:
            weights: whole tensors, in any order, on a GPU complete on the calling thread's present
                stream. Each is copied before many more are asked for: up to 64 MiB wait, so that
                small ones are copied together.
            num_receivers: engine processes that take this version. No byte moves before all of
                them have come.

        Raises:
            RuntimeError: if no version was offered since the last `send`.
            ValueError: if `num_receivers` is below 1, if a receiver's sampler refused the weights,
                or if what came is not what `tensors` said; in the last case the receivers have
                been told to give up.
            TypeError: if something is not a `torch.Tensor`; the receivers have been told.
            TimeoutError: if a receiver did not come, or not answer, in time.
            ConnectionError: if a receiver failed or went away; with its reason, if it gave one.
        """
        if self._offered is None:
            raise RuntimeError("WeightStream.send: expected a call of `offer` before each `send`")
        version = self._offered.version
        if num_receivers < 1:
            raise ValueError(
                f"WeightStream.send: expected num_receivers of 1 or more, got {num_receivers}"
            )
        peers: list[_Peer] = []
        try:
            while len(peers) < num_receivers:
                peers.append(self._accept(self._offered, len(peers), num_receivers))
            return self._send(weights, version, peers)
        except BaseException as error:
            for peer in peers:
                # a receiver that is gone cannot be told
                with contextlib.suppress(OSError):
                    send_message(peer.connection, "failed", {"reason": str(error)})
            self._leave_group()
            raise
        finally:
            for peer in peers:
                peer.connection.close()
            self._take_back()
            if self._device.type == "cuda":
                # frees the bucket, which torch keeps until it looks whether receivers have let go
                torch.cuda.ipc_collect()

    def _take_back(self) -> None:
        if self._offered is not None:
            self._offered.listener.close()
            self._offered.path.unlink(missing_ok=True)
            self._offered = None

    def _check(self) -> None:
        if not self._timeout_s > 0.0:
            raise ValueError(f"WeightStream: expected timeout_s above 0, got {self._timeout_s}")
        if not self._tensors:
            raise ValueError("WeightStream: expected the tensors of a model, got none")
        widest = max(self._tensors, key=self._row_bytes)
        needed = 2 * (self._row_bytes(widest) + ALIGNMENT)
        if self._row_bytes(widest) > self._half_bytes:
            raise ValueError(
                f"WeightStream: expected bucket_bytes of {needed} or more (a row of {widest!r} "
                f"must fit into half of it), got halves of {self._half_bytes}"
            )

    def _row_bytes(self, name: str) -> int:
        header = self._tensors[name]
        num_bytes = torch_dtype(header.dtype).itemsize
        for length in header.shape[1:]:
            num_bytes *= length
        return num_bytes

    def _accept(self, offer: _Offer, place: int, num_receivers: int) -> _Peer:
        offer.listener.settimeout(self._timeout_s)
        try:
            connection, _ = offer.listener.accept()
        except TimeoutError as error:
            raise TimeoutError(
                f"weights of version {offer.version}: receiver {place + 1} of {num_receivers} did "
                f"not come within {self._timeout_s:g} s; does a sampler load what was offered?"
            ) from error
        connection.settimeout(self._timeout_s)
        try:
            hello = receive_message(connection, "hello", "refused")
            self._check_hello(hello)
        except BaseException:
            connection.close()
            raise
        return _Peer(connection, hello.fields)

    def _check_hello(self, message: Message) -> None:
        hello = message.fields
        if message.kind == "refused":
            raise ValueError(f"the sampler refused the weights: {hello['reason']}")
        here, there = device_name(self._device), str(hello["device"])
        who = f"the engine's process {hello['process']}"
        if self._carriage == "shared" and there != here:
            raise ValueError(
                f"WeightStream: the bucket lies on {here}, {who} runs on {there}; give the "
                'engine\'s device, or carriage="broadcast"'
            )
        if self._carriage == "broadcast" and here == there != "cpu":
            raise ValueError(
                f"WeightStream: sender and {who} run both on {here}, where NCCL cannot join them; "
                'give carriage="shared"'
            )

    def _send(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: PolicyVersion,
        peers: Sequence[_Peer],
    ) -> StreamReport:
        begin = time.perf_counter()
        carrier = self._meet(version, peers)
        filling = BucketFilling(carrier)
        missing = set(self._tensors)
        for name, tensor in weights:
            dtype = self._checked(name, tensor, missing)
            missing.discard(name)
            filling.add(self._numbers[name], tensor.detach(), dtype)
        if missing:
            raise ValueError(
                f"weights of version {version}: {min(missing)!r} and {len(missing) - 1} more did "
                "not come, although WeightStream's `tensors` has them"
            )
        filling.finish()
        for peer in peers:
            receive_message(peer.connection, "ended")
        return StreamReport(
            num_bytes=filling.num_bytes,
            num_buckets=filling.num_buckets,
            seconds=time.perf_counter() - begin,
            waited_s=filling.waited_s,
        )

    def _meet(self, version: PolicyVersion, peers: Sequence[_Peer]) -> Carrier:
        """Tell every receiver what will come and by which memory."""
        connections = [peer.connection for peer in peers]
        named = json.dumps([[name, *header] for name, header in self._tensors.items()]).encode()
        fields = {"version": version, "half_bytes": self._half_bytes}
        if self._carriage == "shared":
            shared = SharedCarrier(
                connections,
                half_bytes=self._half_bytes,
                device=self._device,
                folder=self._folder,
                checksums=self._checksums,
            )
            for connection in connections:
                send_message(connection, "update", {**fields, **shared.describe()}, named)
            return shared
        # a group lasts as long as its members do
        places = [
            peer.hello["group"] == _name(self._group) and peer.hello["rank"] for peer in peers
        ]
        same = self._group is not None and self._group.num_members == len(peers) + 1
        if not same or sorted(places, key=str) != list(range(1, len(peers) + 1)):
            self._leave_group()
            places = list(range(1, len(peers) + 1))
        file = new_group_file(self._folder) if self._group is None else self._group.file
        for connection, rank in zip(connections, places, strict=True):
            group = {
                "rank": rank,
                "num_members": len(peers) + 1,
                "file": str(file),
                "timeout_s": self._timeout_s,
            }
            send_message(
                connection, "update", {**fields, "carrier": "broadcast", "group": group}, named
            )
        if self._group is None:
            self._group = BroadcastGroup(
                rank=0,
                num_members=len(peers) + 1,
                file=file,
                device=self._device,
                timeout_s=self._timeout_s,
            )
        return BroadcastCarrier(
            connections,
            self._group,
            half_bytes=self._half_bytes,
            device=self._device,
            checksums=self._checksums,
        )

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None

    def _checked(self, name: str, tensor: object, missing: set[str]) -> torch.dtype:
        if name not in missing:
            why = "came twice" if name in self._tensors else "is not in WeightStream's `tensors`"
            raise ValueError(f"weights: {name!r} {why}")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"weights: {name!r}: expected a torch.Tensor, got {type(tensor)}")
        expected = self._tensors[name]
        dtype = torch_dtype(expected.dtype)
        if (
            tuple(tensor.shape) != expected.shape
            or tensor.is_floating_point() != dtype.is_floating_point
        ):
            raise ValueError(
                f"weights: {name!r}: expected shape {list(expected.shape)} and type "
                f"{expected.dtype}, got {list(tensor.shape)} and {tensor.dtype}"
            )
        return dtype


def _folder_for(device: torch.device) -> str | None:
    # on the CPU the bucket itself is a file there
    return None if device.type == "cuda" else "/dev/shm"  # noqa: S108  (a fresh private folder)


def _name(group: BroadcastGroup | None) -> str | None:
    return None if group is None else str(group.file)
