"""A limit on the whole time of an HTTP attempt, from its start to the last byte of its body.

An HTTP client's own time-outs are for one wait each: a server that sends a byte of its headers now
and then keeps every one of them. Here a timer shuts the attempt's connection down, which ends any
wait on it. It takes the connection from the client's tracing (httpcore's ``trace`` extension), so
every attempt needs a connection of its own: send ``Connection: close``.

Looking a name up and connecting have the client's time-out for each address of the name.
"""

import socket
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self, final


class Request(Protocol):
    """Of httpx or httpx2."""

    @property
    def extensions(self) -> dict[str, Any]:
        """What is handed to httpcore; a dictionary that may be added to."""


class _Threads(threading.local):
    current: "AttemptDeadline | None" = None


_threads = _Threads()


def begin_attempt(request: Request) -> None:
    """A client's hook for requests: the attempt that this thread begins has its time from now.

    Requests outside of an `AttemptDeadline` are left alone.
    """
    if _threads.current is not None:
        _threads.current.begin(request)


@final
class AttemptDeadline:
    """Limits each attempt of this thread while it is entered.

    Args:
        timeout_s: seconds of one attempt.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._connection: socket.socket | None = None
        self._deadline = time.monotonic() + timeout_s

    def __enter__(self) -> Self:
        _threads.current = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _threads.current = None
        self._end()

    @property
    def expired(self) -> bool:
        """Whether the last attempt has used its time up."""
        return time.monotonic() >= self._deadline

    def begin(self, request: Request) -> None:
        """Begin an attempt: the one before it, if any, is over."""
        self._end()
        self._deadline = time.monotonic() + self._timeout_s
        request.extensions["trace"] = self._trace
        timer = threading.Timer(self._timeout_s, self._shut_down)
        timer.daemon = True
        self._timer = timer
        timer.start()

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        if event != "connection.connect_tcp.complete":
            return
        # a copy of the descriptor: TLS takes the socket's own over
        connection = info["return_value"].get_extra_info("socket").dup()
        with self._lock:
            self._connection = connection
        if self.expired:
            self._shut_down()

    def _shut_down(self) -> None:
        with self._lock:
            if self._connection is not None and self.expired:
                try:
                    self._connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # the other side was faster
                    return

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
