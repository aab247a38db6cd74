"""The HTTP server of a sampler, in the sampler's own process and event loop."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Self, final

import uvicorn
from starlette.types import ASGIApp

from rollout_vllm.admission import Admission
from rollout_vllm.errors import StartError
from rollout_vllm.server_config import ServerConfig, read_api_key
from rollout_vllm.server_guard import Guard

_LAST_ANSWERS_S = 5
"""Time, in seconds, that clients have to take the last answers of a server that ends."""


@final
class _Uvicorn(uvicorn.Server):
    """Signals are the business of whoever runs the event loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


@final
class Server:
    """A port that is taken at once, and answers once it has an application. Made by `bound`."""

    def __init__(self, listening: socket.socket, *, host: str, api_key: str | None) -> None:
        self._socket = listening
        self._host = host
        self._api_key = api_key
        port = listening.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        """Base URL that OpenAI's clients take, with the real port."""

        self._uvicorn: _Uvicorn | None = None
        self._running: asyncio.Task[None] | None = None

    @classmethod
    def bound(cls, config: ServerConfig) -> Self:
        """Read the key and take the port.

        Raises:
            ValueError: as `read_api_key`.
            StartError: if the port cannot be had.
        """
        api_key = read_api_key(config, os.environ)
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        # a port whose last connections are still closing down is free
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((config.host, config.port))
        except OSError as error:
            listening.close()
            message = (
                f"ServerConfig: cannot listen on {config.host} port {config.port}: {error}; "
                "give port = 0 for a free one"
            )
            raise StartError(message) from error
        return cls(listening, host=config.host, api_key=api_key)

    async def start(self, app: ASGIApp, admission: Admission) -> None:
        """Answer requests from now on.

        Args:
            app: answers those that may ask.
            admission: the sampler behind it.
        """
        guard = Guard(app, admission, api_key=self._api_key, host=self._host)
        settings = uvicorn.Config(
            guard,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_LAST_ANSWERS_S,
        )
        self._uvicorn = _Uvicorn(settings)
        self._running = asyncio.create_task(self._uvicorn.serve(sockets=[self._socket]))
        while not self._uvicorn.started:
            if self._running.done():
                self._running.result()
                raise StartError(f"the server on {self.url} ended while it started")
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Take no more requests, let clients read the last answers, and free the port.

        May be called twice.
        """
        if self._uvicorn is not None and self._running is not None:
            self._uvicorn.should_exit = True
            await self._running
        self._socket.close()
