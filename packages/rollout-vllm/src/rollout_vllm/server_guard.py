"""What stands before vLLM's HTTP server: who may ask, and which weights answered.

Answers of vLLM's server say, in two headers, between which versions of the weights every token of
theirs was drawn: the versions when the request came and when its answer began. A streamed answer
goes on after that, so it has the first header alone.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable
from typing import final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_vllm.admission import Admission
from rollout_vllm.errors import SamplerClosedError

OLDEST_VERSION_HEADER = "x-policy-version-oldest"
"""No token of the answer was drawn from an older version."""

NEWEST_VERSION_HEADER = "x-policy-version-newest"
"""No token of the answer was drawn from a newer version; not in streamed answers."""

_LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})

Headers = dict[bytes, bytes]


@final
class Guard:
    """An ASGI application around another one.

    Args:
        app: answers what is let through.
        admission: the sampler behind it.
        api_key: what clients must send as bearer token; None: they need none, but must call the
            server by a local name, so that no page in a browser reaches it through a name of its
            own (DNS rebinding).
        host: address that the server listens on.
    """

    def __init__(
        self, app: ASGIApp, admission: Admission, *, api_key: str | None, host: str
    ) -> None:
        self._app = app
        self._admission = admission
        self._key_digest = None if api_key is None else _digest(api_key)
        self._names = _LOCAL_NAMES | {host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return  # the server is told to take nothing else
        refused = self._refusal(dict(scope["headers"]))
        if refused is not None:
            await _answer(send, *refused)
            return
        oldest = self._admission.policy_version

        async def send_versions(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": self._marked(message["headers"], oldest)}
            await send(message)

        await self._app(scope, receive, send_versions)

    def _refusal(self, headers: Headers) -> tuple[int, str, str] | None:
        """Status, type and text of the answer to a request that is not let through."""
        if self._key_digest is not None:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            given = hashlib.sha256(token.strip()).digest()
            if scheme.lower() != b"bearer" or not secrets.compare_digest(given, self._key_digest):
                text = "expected the server's key as bearer token in the header Authorization"
                return 401, "AuthenticationError", text
        else:
            name, _, port = headers.get(b"host", b"").decode("latin-1").rpartition(":")
            if (name if port.isdigit() else f"{name}:{port}".lstrip(":")) not in self._names:
                text = "a server without a key answers to this machine's local names only"
                return 403, "PermissionDeniedError", text
        try:
            self._admission.check_open()
        except SamplerClosedError as error:
            return 503, "ServiceUnavailableError", str(error)
        return None

    def _marked(
        self, headers: Iterable[tuple[bytes, bytes]], oldest: int
    ) -> list[tuple[bytes, bytes]]:
        marked = [*headers, (OLDEST_VERSION_HEADER.encode(), str(oldest).encode())]
        streamed = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in marked
        )
        if not streamed:
            newest = str(self._admission.policy_version).encode()
            marked.append((NEWEST_VERSION_HEADER.encode(), newest))
        return marked


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("ascii")).digest()


async def _answer(send: Send, status: int, kind: str, text: str) -> None:
    """An error in the words of OpenAI's API."""
    error = {"message": text, "type": kind, "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 401:  # noqa: PLR2004  (named by HTTP)
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
