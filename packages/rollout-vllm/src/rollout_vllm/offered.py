"""What a `WeightStream` offers: small, picklable, and no weight in it."""

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from rl_contracts.rollout import PolicyVersion
from rollout_vllm.config import Dtype
from rollout_vllm.headers import TensorHeader
from rollout_vllm.stream_wire import send_message

ANYWHERE = "anywhere"
"""Key of a sender that takes receivers on any device."""


@attrs.frozen(kw_only=True)
class OfferedWeights:
    """A version of the weights that a sender on this machine is ready to send.

    A `rollout_vllm.publication.Publication`.
    """

    version: PolicyVersion
    """Optimizer steps behind these weights."""

    dtype: Dtype
    """Type that floating-point weights are cast to."""

    headers: Mapping[str, TensorHeader]
    """Names and shapes of what will be sent."""

    sockets: Mapping[str, Path]
    """Where senders listen, by the device (`rollout_vllm.buckets.device_name`) whose engine process
    shall go there; `anywhere` for all others."""

    timeout_s: float
    """Longest wait for the sender, in seconds."""

    def tensors(self) -> Mapping[str, TensorHeader]:
        """Names and shapes of all weights."""
        return self.headers

    def different_heads(self, tied_head: str) -> list[str]:
        """None can be named before the weights have come; the engine then uses the embedding."""
        del tied_head
        return []

    def instructions(self) -> dict[str, object]:
        """What the receiving half needs to know."""
        return {
            "transport": "stream",
            "sockets": {device: str(path) for device, path in self.sockets.items()},
            "timeout_s": self.timeout_s,
        }

    def refuse(self, reason: str) -> None:
        """Make each sender's `send` fail with the reason instead of waiting."""
        for path in self.sockets.values():
            # a sender that is gone need not be told
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(self.timeout_s)
                connection.connect(str(path))
                send_message(connection, "refused", {"reason": reason, "process": os.getpid()})

    def remove(self) -> None:
        """Nothing is left to free: the sender keeps what is its own."""


def offered_together(offers: Sequence[OfferedWeights]) -> OfferedWeights:
    """One offer of several senders of the same weights, each on a GPU of its own.

    For an engine whose workers share those GPUs with the trainer's ranks: every rank exports, and
    each worker takes from the rank on its own GPU.

    Raises:
        ValueError: if they do not offer the same weights, or two are on one device.
    """
    first = offers[0]
    sockets: dict[str, Path] = {}
    for offer in offers:
        if (offer.version, offer.dtype, offer.headers) != (
            first.version,
            first.dtype,
            first.headers,
        ):
            raise ValueError(
                f"offered_together: expected offers of the same weights, got version "
                f"{first.version} with {len(first.headers)} tensors and version {offer.version} "
                f"with {len(offer.headers)}, or other names and shapes"
            )
        for device, path in offer.sockets.items():
            if device in sockets:
                raise ValueError(
                    f"offered_together: expected one sender on each device, got two on {device}"
                )
            sockets[device] = path
    return attrs.evolve(first, sockets=sockets)
