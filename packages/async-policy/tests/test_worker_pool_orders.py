"""Orders of events in a pool that real processes show too seldom to be tested with them.

The actors are objects of this process; `test_worker_pool` has real ones.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from async_policy import GroupLostError, PoolLimits, WorkerPool
from async_policy.errors import ActorLostError
from async_policy.ray_actor import Actor
from rl_contracts.rollout import PolicyVersion


class Replica:
    """As much of an actor as the pool knows; holds the weights that were loaded last."""

    def __init__(self) -> None:
        self.version = PolicyVersion(0)
        self.gone = asyncio.Event()

    async def ready(self, *, timeout_s: float | None) -> None:
        del timeout_s
        await asyncio.sleep(0)
        if self.gone.is_set():
            message = "its process died"
            raise ActorLostError(message)

    def stop(self) -> None:
        self.gone.set()


class Pool:
    """A pool of replicas, by name."""

    def __init__(self, **limits: float) -> None:
        self.replicas: dict[str, Replica] = {}
        settings: dict[str, float] = {"restart_s": 60.0, **limits}
        self.pool = WorkerPool[Replica](self.start, limits=PoolLimits(**settings))  # type: ignore[arg-type]

    def start(self, name: str) -> Actor[Replica]:
        self.replicas[name] = Replica()
        return cast("Actor[Replica]", self.replicas[name])


def load(version: int, *, when: asyncio.Event) -> Callable[[Actor[Replica]], Awaitable[None]]:
    async def to(actor: Actor[Replica]) -> None:
        await when.wait()
        cast("Replica", actor).version = PolicyVersion(version)

    return to


def test_the_newest_of_two_publishes_is_what_workers_serve_with() -> None:
    """Publish 1 takes long, and publish 2 begins meanwhile; 1 must not be loaded over 2."""

    async def run() -> None:
        late, now = asyncio.Event(), asyncio.Event()
        now.set()
        world = Pool()
        async with world.pool as pool:
            await pool.join("a")
            first = asyncio.create_task(pool.publish(PolicyVersion(1), load(1, when=late)))
            await asyncio.sleep(0.01)
            second = asyncio.create_task(pool.publish(PolicyVersion(2), load(2, when=now)))
            await asyncio.sleep(0.01)
            late.set()
            await asyncio.gather(first, second)
            assert pool.status[0].version == world.replicas["a"].version == 2

    asyncio.run(run())


def test_a_publish_while_a_dead_worker_leaves_reaches_the_others() -> None:
    """The one that leaves has no actor: it died and would have been started again."""

    async def run() -> None:
        now = asyncio.Event()
        now.set()
        world = Pool()
        async with world.pool as pool:
            await pool.join("a", "b")
            world.replicas["a"].gone.set()
            await pool._until(lambda: pool.status[0].state == "starting")
            leaving = asyncio.create_task(pool.leave("a"))
            await asyncio.sleep(0)
            await pool.publish(PolicyVersion(3), load(3, when=now))
            await leaving
            assert [(w.name, w.version) for w in pool.status] == [("b", 3)]

    asyncio.run(run())


def test_leaving_twice_at_a_time_is_leaving_once() -> None:
    async def run() -> None:
        async with Pool().pool as pool:
            await pool.join("a", "b")
            work = asyncio.create_task(pool.call(lambda _: asyncio.sleep(0.05), what="a nap"))
            await asyncio.sleep(0.01)
            await asyncio.gather(pool.leave("a"), pool.leave("a"))
            await work
            assert [worker.name for worker in pool.status] == ["b"]

    asyncio.run(run())


def test_a_join_that_is_cancelled_leaves_nobody_behind() -> None:
    """The name is free again, and what was started is stopped."""

    async def run() -> None:
        world = Pool()
        async with world.pool as pool:
            never = asyncio.Event()
            publishing = asyncio.create_task(pool.publish(PolicyVersion(1), load(1, when=never)))
            await asyncio.gather(publishing, return_exceptions=True)
            joining = asyncio.create_task(pool.join("a"))
            await asyncio.sleep(0.01)
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
            assert pool.status == ()
            assert world.replicas["a"].gone.is_set()

    asyncio.run(run())


def test_an_error_of_the_work_itself_does_not_cost_the_worker() -> None:
    """A TimeoutError of its own is not the pool's limit; that limit is, and the worker pays."""

    async def fail(_: object) -> None:
        message = "a server of the caller's"
        raise TimeoutError(message)

    async def run() -> None:
        async with Pool(call_s=0.05).pool as pool:
            await pool.join("a")
            with pytest.raises(TimeoutError, match="of the caller's"):
                await pool.call(fail, what="work")
            assert (pool.status[0].state, pool.status[0].num_running) == ("serving", 0)
            with pytest.raises(GroupLostError, match=r"did not answer within 0\.05 s"):
                await pool.call(lambda _: asyncio.sleep(9), what="work")
            assert pool.status[0].state == "starting"

    asyncio.run(run())
