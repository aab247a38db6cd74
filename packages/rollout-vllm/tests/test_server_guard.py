"""The server's door: keys, names, versions, and what a closed sampler answers; no vLLM."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rl_contracts.rollout import PolicyVersion
from rollout_vllm import ServerConfig, StartError, VllmConfig, WeightUpdateError
from rollout_vllm.admission import Admission
from rollout_vllm.engine import Engine
from rollout_vllm.lifetime import Lifetime
from rollout_vllm.server import Server
from rollout_vllm.weight_updates import WeightUpdates


class Ending:
    """As much of an engine as the end of a sampler needs."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Nothing runs."""
        assert not request_ids

    def shutdown(self) -> None:
        """Nothing to end."""


class Behind:
    """A sampler's state, and an application that counts what it is asked."""

    def __init__(self) -> None:
        engine = cast("Engine", Ending())
        config = VllmConfig(model="m", max_model_len=64, kv_cache_gib=1.0)
        self.lifetime = Lifetime(engine)
        self.weights = WeightUpdates(
            engine, self.lifetime, config=config, policy_version=PolicyVersion(3), tensors={}
        )
        self.admission = Admission(self.lifetime, self.weights)
        self.asked = 0
        self.app = Starlette(
            routes=[
                Route("/v1/plain", self.plain, methods=["GET"]),
                Route("/v1/stream", self.stream, methods=["GET"]),
            ]
        )

    async def plain(self, request: Request) -> Response:
        """An answer during which the weights change."""
        assert request.method == "GET"
        self.asked += 1
        self.weights.policy_version = PolicyVersion(self.weights.policy_version + 2)
        return JSONResponse({})

    async def stream(self, request: Request) -> Response:
        """An answer in parts."""
        assert request.method == "GET"
        return StreamingResponse(iter(["data: 1\n\n"]), media_type="text/event-stream")


def run(
    test: Callable[[Behind, str, httpx.AsyncClient], Awaitable[None]], config: ServerConfig
) -> None:
    """Run it against a real server on a real port."""

    async def body() -> None:
        behind = Behind()
        server = Server.bound(config)
        await server.start(behind.app, behind.admission)
        async with httpx.AsyncClient() as client:
            await test(behind, server.url, client)
        await server.close()
        await server.close()
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(server.url + "/plain")

    asyncio.run(body())


def test_the_key_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Wrong keys reach nothing behind the door, and no log holds a key."""
    file = tmp_path / "key"
    file.write_text("right-key", encoding="utf-8")

    async def test(behind: Behind, url: str, client: httpx.AsyncClient) -> None:
        for header in (
            "Bearer wrong-key",
            "Bearer right-key-and-more",
            "Basic right-key",
            "",
            None,
        ):
            headers = {} if header is None else {"Authorization": header}
            answer = await client.get(url + "/plain", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "AuthenticationError"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "x-policy-version-oldest" not in answer.headers
        assert behind.asked == 0
        answer = await client.get(url + "/plain", headers={"Authorization": "bearer right-key"})
        assert answer.status_code == 200
        assert behind.asked == 1

    caplog.set_level(0)
    run(test, ServerConfig(api_key_file=str(file)))
    assert "right-key" not in caplog.text


def test_without_a_key_only_local_names_are_answered() -> None:
    """A page whose name was made to point here does not get through."""

    async def test(behind: Behind, url: str, client: httpx.AsyncClient) -> None:
        for name in ("evil.example:80", "evil.example", "127.0.0.1.evil.example:80"):
            answer = await client.get(url + "/plain", headers={"Host": name})
            assert answer.status_code == 403
            assert "local names only" in answer.json()["error"]["message"]
        assert behind.asked == 0
        for name in ("localhost:1", "localhost", "[::1]:1", "127.0.0.1"):
            assert (await client.get(url + "/plain", headers={"Host": name})).status_code == 200
        assert (await client.get(url + "/plain")).status_code == 200

    run(test, ServerConfig())


def test_answers_say_between_which_versions_their_tokens_were_drawn() -> None:
    """A streamed answer goes on after its headers, so they cannot name its newest."""

    async def test(behind: Behind, url: str, client: httpx.AsyncClient) -> None:
        answer = await client.get(url + "/plain")
        assert answer.headers["x-policy-version-oldest"] == "3"
        assert answer.headers["x-policy-version-newest"] == "5"
        answer = await client.get(url + "/stream")
        assert answer.headers["x-policy-version-oldest"] == "5"
        assert "x-policy-version-newest" not in answer.headers
        assert behind.asked == 1

    run(test, ServerConfig())


def test_a_closed_sampler_answers_with_the_reason() -> None:
    """Nobody waits for an engine that is gone."""

    async def test(behind: Behind, url: str, client: httpx.AsyncClient) -> None:
        await behind.lifetime.end(WeightUpdateError("the update to version 4 broke off"))
        answer = await client.get(url + "/plain")
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the update to version 4 broke off"
        assert behind.asked == 0

    run(test, ServerConfig())


def test_a_port_that_is_taken_is_named() -> None:
    """Before vLLM is started, with what to do."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=rf"127.0.0.1 port {port}: .*in use; give port = 0"):
            Server.bound(ServerConfig(port=port))


def test_ipv6() -> None:
    """Its address stands in brackets."""

    async def test(behind: Behind, url: str, client: httpx.AsyncClient) -> None:
        assert url.startswith("http://[::1]:")
        assert (await client.get(url + "/plain")).status_code == 200
        assert behind.asked == 1

    run(test, ServerConfig(host="::1"))
