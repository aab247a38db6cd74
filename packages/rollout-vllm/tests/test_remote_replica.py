"""A replica behind an actor system: what is called, cancelled and translated; no actors."""

import asyncio
from collections.abc import Awaitable

import pytest

from rl_contracts.rollout import SamplingParams
from rollout_vllm import StartError
from rollout_vllm.remote_replica import RemoteReplica
from rollout_vllm.replica import ReplicaLostError

PARAMS = SamplingParams(max_new_tokens=1)


class TaskError(Exception):
    """What the actor system raises for an error of the method."""


class FakeRemote:
    """Answers every call with the same future."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.calls: list[str] = []

    def submit(self, method: str, *args: object, **kwargs: object) -> Awaitable[object]:
        self.calls.append(f"{method} {args} {sorted(kwargs)}")
        return self.answer

    def cancel(self, call: Awaitable[object]) -> None:
        assert call is self.answer
        self.calls.append("cancel")

    def raised(self, error: Exception) -> Exception | None:
        cause = error.__cause__
        return cause if isinstance(error, TaskError) and isinstance(cause, Exception) else None

    def end(self) -> None:
        self.calls.append("end")


def test_calls_are_passed_on() -> None:
    """`start` tells the process; `close` ends it."""

    async def body() -> None:
        remote = FakeRemote()
        remote.answer.set_result(42)
        replica = await RemoteReplica.start(remote, name="replica 0")
        assert replica.process == 42
        await replica.close()
        assert remote.calls == ["start () []", "close () []", "end"]

    asyncio.run(body())


def test_cancelling_a_request_cancels_it_over_there() -> None:
    """Its places are freed, and the caller sees its own cancellation."""

    async def body() -> None:
        remote = FakeRemote()
        replica = RemoteReplica(remote, name="replica 0")
        task = asyncio.create_task(replica.sample((1, 2), num_samples=3, params=PARAMS))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert remote.calls == ["sample ([1, 2],) ['images', 'num_samples', 'params']", "cancel"]

    asyncio.run(body())


def test_errors_are_those_of_the_sampler_or_name_the_replica() -> None:
    """A caller need know no actor system; a start that fails leaves no process."""

    async def body() -> None:
        remote = FakeRemote()
        error = TaskError("StartError, over there")
        error.__cause__ = StartError("no memory")
        remote.answer.set_exception(error)
        with pytest.raises(StartError, match="no memory"):
            await RemoteReplica.start(remote, name="replica 0")
        assert remote.calls == ["start () []", "end"]
        gone = FakeRemote()
        gone.answer.set_exception(OSError("connection lost"))
        replica = RemoteReplica(gone, name="replica 0")
        with pytest.raises(ReplicaLostError, match="replica 0 is gone: connection lost"):
            await replica.ping()
        with pytest.raises(ReplicaLostError):
            await replica.close()
        assert gone.calls[-1] == "end"

    asyncio.run(body())
