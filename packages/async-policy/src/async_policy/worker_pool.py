"""Several workers that do the same work: the dead are replaced, the slow are relieved.

::

                     start(name), ready, newest weights
    join(name) ──▶ starting ───────────────────────────▶ serving ──▶ leaving ──▶ gone
                      ▲                                     │  leave(name)
                      │  at most max_restarts times         │ died, or did not answer in time
                      └─────────────────────────────────────┘

Work that was with a worker that died or stalled ends in `GroupLostError`, on which `Rollouts` has
the group sampled again, with its index and so with its seed, by whoever is free. Nothing that a
worker said after it was given up is listened to: its process is ended first.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Self, TypeVar, final

from async_policy.errors import (
    ActorError,
    ActorLostError,
    GroupLostError,
    WaitTimeoutError,
    WorkerPoolError,
)
from async_policy.pool_limits import PoolLimits, WorkerState, WorkerStatus
from async_policy.ray_actor import Actor
from rl_contracts.rollout import PolicyVersion

logger = logging.getLogger(__name__)

WorkerT = TypeVar("WorkerT")
R = TypeVar("R")


@dataclass(eq=False)
class _Worker(Generic[WorkerT]):
    """A place in the pool, and who has it at present."""

    name: str
    state: WorkerState = "starting"
    actor: Actor[WorkerT] | None = None
    version: PolicyVersion | None = None
    num_running: int = 0
    num_restarts: int = 0
    reason: str = ""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    keeper: "asyncio.Task[None] | None" = None


@final
class WorkerPool(Generic[WorkerT]):
    """Gives work to the least busy of several actors, and keeps as many at work as it was told.

    Use it with ``async with``: on the way out every worker is stopped.
    """

    def __init__(
        self, start: Callable[[str], Actor[WorkerT]], *, limits: PoolLimits | None = None
    ) -> None:
        """Name what starts a worker; starts none.

        Args:
            start: starts the actor of this name. Called again when one has to be replaced, after
                the one before was stopped.
            limits: how long to wait, and how often to start again; None for the defaults.
        """
        self._start = start
        self._limits = limits or PoolLimits()
        self._workers: dict[str, _Worker[WorkerT]] = {}
        self._version: PolicyVersion | None = None
        self._load: Callable[[Actor[WorkerT]], Awaitable[object]] | None = None
        self._changed = asyncio.Event()
        self._num_lost = 0

    async def __aenter__(self) -> Self:
        """Open; workers join with `join`."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop every worker."""
        keepers = [worker.keeper for worker in self._workers.values() if worker.keeper is not None]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        self._workers.clear()

    @property
    def status(self) -> tuple[WorkerStatus, ...]:
        """Every worker, in the order in which they joined."""
        return tuple(
            WorkerStatus(
                name=worker.name,
                state=worker.state,
                version=worker.version,
                num_running=worker.num_running,
                num_restarts=worker.num_restarts,
            )
            for worker in self._workers.values()
        )

    @property
    def num_lost(self) -> int:
        """Pieces of work that were lost with a worker."""
        return self._num_lost

    async def join(self, *names: str) -> None:
        """Start workers beside those there are, and wait until each serves, with newest weights.

        Raises:
            ValueError: if a name is taken.
            WorkerPoolError: if one cannot serve, however often it is started; the message says why.
        """
        taken = [name for name in names if name in self._workers]
        if taken or len(set(names)) < len(names):
            message = f"WorkerPool.join: expected new names, got {', '.join(taken or names)}"
            raise ValueError(message)
        joined = [_Worker[WorkerT](name) for name in names]
        for worker in joined:
            self._workers[worker.name] = worker
            worker.keeper = asyncio.create_task(self._keep(worker), name=f"keep {worker.name}")
            worker.keeper.add_done_callback(functools.partial(self._on_kept, worker))
        try:
            await self._until(lambda: all(worker.state != "starting" for worker in joined))
        except asyncio.CancelledError:
            for worker in joined:
                await self._drop(worker)
            raise
        lost = [worker for worker in joined if worker.state == "gone"]
        for worker in lost:
            await self._drop(worker)
        if lost:
            raise WorkerPoolError(f"workers cannot join: {_reasons(lost)}")

    async def leave(self, name: str) -> None:
        """Give a worker no new work, wait for what it has in hand, and stop it.

        What it has not finished after `leave_s` is lost, and so done again by another.

        Raises:
            ValueError: if there is no such worker.
        """
        worker = self._workers.get(name)
        if worker is None:
            message = f"WorkerPool.leave: no worker is called '{name}'; {self._names()}"
            raise ValueError(message)
        worker.state = "leaving"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.leave_s):
                await self._until(lambda: worker.num_running == 0)
        if worker.num_running:
            logger.warning("%s leaves with %d unfinished", name, worker.num_running)
        await self._drop(worker)

    async def publish(
        self, version: PolicyVersion, load: Callable[[Actor[WorkerT]], Awaitable[object]]
    ) -> None:
        """Give every worker the weights of a version.

        After it returns, no worker serves with older ones: those that are being replaced take them
        before they serve, and so do those that join later. `load` must work until the next
        publish. A worker that dies meanwhile is replaced.

        Raises:
            ValueError: if the version falls.
            ActorMethodError: if a worker refused the weights.
            WorkerPoolError: if no worker is left.
        """
        if self._version is not None and version < self._version:
            message = f"WorkerPool.publish: version {version} after {self._version}"
            raise ValueError(message)
        self._version, self._load = version, load
        # one that leaves may have died already, and has no actor then
        at_work = [
            (worker, worker.actor)
            for worker in self._workers.values()
            if worker.state in {"serving", "leaving"} and worker.actor is not None
        ]
        await _all_of(self._load_into(worker, actor) for worker, actor in at_work)
        await self._wait_for_one("the weights of version " + str(version))

    async def call(self, work: Callable[[Actor[WorkerT]], Awaitable[R]], *, what: str) -> R:
        """Have the least busy worker do this, as soon as one serves.

        Args:
            work: what to do with the actor, as in ``lambda actor: actor.call(Sampler.sample, x)``.
            what: names the work in messages.

        Raises:
            GroupLostError: if the worker died or did not answer in time: to be done again.
            ActorMethodError: if the worker's method raised.
            WorkerPoolError: if no worker is left.

        Whatever else `work` raises is raised as it is, and the worker stays.
        """
        worker = await self._wait_for_one(what)
        actor = worker.actor
        assert actor is not None  # noqa: S101 -- it serves
        worker.num_running += 1
        limit = asyncio.timeout(self._limits.call_s)
        try:
            async with limit:
                return await work(actor)
        except (ActorLostError, TimeoutError) as error:
            if not limit.expired() and not isinstance(error, ActorLostError | WaitTimeoutError):
                raise  # of something that `work` waited for, and no fault of the worker
            late = f"it did not answer within {self._limits.call_s:g} s (limit: call_s)"
            reason = str(error) or late
            self._num_lost += 1
            self._give_up(worker, actor, reason)
            message = f"{what} was lost with worker '{worker.name}': {reason}"
            raise GroupLostError(message) from error
        finally:
            if worker.actor is actor:
                worker.num_running -= 1
            self._notify()

    async def _wait_for_one(self, what: str) -> _Worker[WorkerT]:
        """The least busy worker, once one serves."""

        def serving() -> list[_Worker[WorkerT]]:
            return [w for w in self._workers.values() if w.state == "serving"]

        def hopeless() -> bool:
            return all(w.state in {"leaving", "gone"} for w in self._workers.values())

        await self._until(lambda: bool(serving()) or hopeless())
        found = serving()
        if not found:
            gone = list(self._workers.values())
            why = _reasons(gone) if gone else "none has joined"
            raise WorkerPoolError(f"no worker is left for {what}: {why}")
        return min(found, key=lambda worker: worker.num_running)

    async def _keep(self, worker: _Worker[WorkerT]) -> None:
        """Have somebody in this place, until it has failed too often."""
        try:
            while True:
                worker.failed.clear()
                try:
                    await self._serve(worker)
                except (ActorError, WaitTimeoutError, ValueError) as error:
                    worker.reason = worker.reason or str(error)
                self._stop(worker)
                if worker.num_restarts == self._limits.max_restarts:
                    worker.state = "gone"
                    logger.error(
                        "worker '%s' is given up after %d restarts: %s",
                        worker.name,
                        worker.num_restarts,
                        worker.reason,
                    )
                    return
                worker.num_restarts += 1
                logger.warning(
                    "worker '%s' is replaced (restart %d of %d): %s",
                    worker.name,
                    worker.num_restarts,
                    self._limits.max_restarts,
                    worker.reason,
                )
                if worker.state != "leaving":
                    worker.state = "starting"
                self._notify()
                await asyncio.sleep(self._limits.restart_s)
        finally:
            self._stop(worker)

    async def _serve(self, worker: _Worker[WorkerT]) -> None:
        """Start an actor and have it serve until it fails."""
        worker.actor = actor = self._start(worker.name)
        worker.version, worker.num_running, worker.reason = None, 0, ""
        worker.loading = asyncio.Lock()
        await actor.ready(timeout_s=self._limits.start_s)
        while worker.version != self._version:
            await self._load_newest(worker, actor)
        if worker.state == "starting":
            worker.state = "serving"
            logger.info("worker '%s' serves with version %s", worker.name, worker.version)
        self._notify()
        watch = asyncio.create_task(self._watch(actor), name=f"watch {worker.name}")
        failed = asyncio.create_task(worker.failed.wait(), name=f"failure of {worker.name}")
        try:
            await asyncio.wait({watch, failed}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
        finally:
            watch.cancel()
            failed.cancel()
            await asyncio.gather(watch, failed, return_exceptions=True)

    async def _watch(self, actor: Actor[WorkerT]) -> None:
        """Raise when the actor's process is gone, also while it has no work."""
        while True:
            await actor.ready(timeout_s=None)
            await asyncio.sleep(1.0)

    async def _load_into(self, worker: _Worker[WorkerT], actor: Actor[WorkerT]) -> None:
        try:
            await self._load_newest(worker, actor)
        except (ActorLostError, WaitTimeoutError) as error:
            self._give_up(worker, actor, str(error))

    async def _load_newest(self, worker: _Worker[WorkerT], actor: Actor[WorkerT]) -> None:
        # one load after the other: the one that ends last must be that of the newest version
        async with worker.loading:
            version, load = self._version, self._load
            if load is None or worker.version == version:
                return
            try:
                async with asyncio.timeout(self._limits.load_s):
                    await load(actor)
            except TimeoutError as error:
                message = (
                    f"it did not take the weights of version {version} within "
                    f"{self._limits.load_s:g} s (limit: load_s)"
                )
                raise WaitTimeoutError(str(error) or message) from error
            if worker.actor is actor:
                worker.version = version

    def _give_up(self, worker: _Worker[WorkerT], actor: Actor[WorkerT], reason: str) -> None:
        """Have the worker's keeper replace this actor, if it has not been already."""
        if worker.actor is not actor or worker.failed.is_set():
            return
        worker.reason = reason
        if worker.state == "serving":
            worker.state = "starting"
        worker.failed.set()

    async def _drop(self, worker: _Worker[WorkerT]) -> None:
        """Stop a worker and forget it, if nobody else has."""
        if worker.keeper is not None:
            worker.keeper.cancel()
            await asyncio.gather(worker.keeper, return_exceptions=True)
        if self._workers.get(worker.name) is worker:
            del self._workers[worker.name]
        self._notify()

    def _stop(self, worker: _Worker[WorkerT]) -> None:
        if worker.actor is not None:
            worker.actor.stop()
        worker.actor = None
        worker.num_running = 0

    def _on_kept(self, worker: _Worker[WorkerT], keeper: asyncio.Task[None]) -> None:
        """Nobody keeps this place any more; an error of `start` or of `load` must not be lost."""
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None:
            worker.reason = repr(error)
            logger.error("worker '%s' is given up: %r", worker.name, error)
        worker.state = "gone"
        self._notify()

    def _notify(self) -> None:
        """Wake everybody who waits for another state; each looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _names(self) -> str:
        return f"there are {', '.join(self._workers) or 'none'}"


async def _all_of(loads: Iterable[Awaitable[None]]) -> None:
    """Wait for all; the first error afterwards."""
    results = await asyncio.gather(*loads, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _reasons(workers: Iterable[_Worker[WorkerT]]) -> str:
    return "; ".join(
        f"'{worker.name}' after {worker.num_restarts} restarts: {worker.reason}"
        for worker in workers
    )
