"""Messages between the two halves of a stream of weights, over one socket on one machine.

::

    receiver                                      sender
    hello (or refused: reason) ──────────────────▶
                    ◀──────────────────────────── update: tensors, memory, version
                    ◀──────────────────────────── bucket: which half, where each tensor lies
    done: which half ────────────────────────────▶
                    ◀──────────────────────────── end
    ended ───────────────────────────────────────▶

A message is a line of JSON behind its length, and bytes behind theirs. Nothing is unpickled.
"""

import json
import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

_LENGTHS = struct.Struct("<IQ")
# a header of 100,000 tensors is about 10 MB; more is a stranger's
_LONGEST_FIELDS = 2**20
_LONGEST_PAYLOAD = 2**28


class Message(NamedTuple):
    """One message."""

    kind: str
    fields: Mapping[str, object]
    payload: bytes


def send_message(
    connection: socket.socket, kind: str, fields: Mapping[str, object], payload: bytes = b""
) -> None:
    """Send one message as a whole.

    Raises:
        ConnectionError: if the other side has gone; with its reason, if it gave one.
        TimeoutError: if it does not take the message within the socket's timeout.
    """
    head = json.dumps({"kind": kind, **fields}).encode()
    try:
        connection.sendall(_LENGTHS.pack(len(head), len(payload)) + head + payload)
    except ConnectionError:
        # what it said before it went still lies here
        while True:
            receive_message(connection, "done", "bucket", "end")


def receive_message(connection: socket.socket, *expected: str) -> Message:
    """Receive one message of an expected kind.

    Raises:
        ConnectionError: if the other side has gone, says that it failed, or says something else.
        TimeoutError: if nothing comes within the socket's timeout.
    """
    num_fields, num_payload = _LENGTHS.unpack(_receive(connection, _LENGTHS.size))
    if num_fields > _LONGEST_FIELDS or num_payload > _LONGEST_PAYLOAD:
        raise ConnectionError(
            f"weights: expected a message of the other half, got lengths {num_fields} and "
            f"{num_payload}"
        )
    fields = json.loads(_receive(connection, num_fields))
    payload = _receive(connection, num_payload)
    kind = fields.pop("kind")
    if kind == "failed":
        raise ConnectionError(f"weights: the other half failed: {fields['reason']}")
    if kind not in expected:
        raise ConnectionError(f"weights: expected the message {expected}, got {kind!r}")
    return Message(kind, fields, payload)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("weights: the other half went away in the middle")
        view = view[count:]
    return bytes(received)
