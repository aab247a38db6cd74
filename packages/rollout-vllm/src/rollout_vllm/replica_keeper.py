"""Keeps so many replicas running: starts them, asks after them, replaces the dead.

::

    serving ── died, or no answer ──▶ down ── start ──▶ starting ── prepare ──▶ serving

What a replica needs before it may serve, and when it must not be started, is said by
`rollout_vllm.replica_updates`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import NamedTuple, final

from rollout_vllm.errors import RolloutError, SamplerClosedError
from rollout_vllm.gathered import gathered
from rollout_vllm.replica import Replica, ReplicaLostError, ReplicaSetConfig


class Slot:
    """The place of one replica."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.replica: Replica | None = None
        """The one that serves; None while there is none."""

        self.running = 0
        """Samples that it draws now."""

        self.lost = asyncio.Event()
        """Set when that replica is gone."""


class Outcome(NamedTuple):
    """How something that was asked of several replicas went with one."""

    slot: Slot
    replica: Replica
    error: Exception | None


@final
class ReplicaKeeper:
    """The replicas of a set, each in its slot.

    Args:
        start_replica: starts replica number i; called again when it has died.
        config: how many, and when one counts as dead.
        joining: held while a replica is prepared and joins, so that nothing changes meanwhile.
        prepare: brings a replica that was started to what the others are like, in limited time.
    """

    def __init__(
        self,
        start_replica: Callable[[int], Awaitable[Replica]],
        config: ReplicaSetConfig,
        *,
        joining: asyncio.Lock,
        prepare: Callable[[int, Replica], Awaitable[None]],
    ) -> None:
        self._start_replica = start_replica
        self._config = config
        self._joining = joining
        self._prepare = prepare
        self.slots = [Slot(number) for number in range(config.num_replicas)]
        self.changed = asyncio.Condition()
        """Notified whenever a replica comes or goes, and by the set."""

        self._may_start = asyncio.Event()
        self._may_start.set()
        self.closed: SamplerClosedError | None = None
        """Why nothing is kept any more."""

        self.losses: list[str] = []
        """Why each replica that was replaced had to be, oldest first."""

        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start all replicas at once, wait for them, and keep them from then on.

        Raises:
            Exception: whatever starting one of them raised; `close` ends the others.
        """
        await gathered(self._fill(slot) for slot in self.slots)
        self._background(self._watch())

    def serving(self) -> list[tuple[Slot, Replica]]:
        """The replicas that answer now."""
        return [(slot, slot.replica) for slot in self.slots if slot.replica is not None]

    def check_open(self) -> None:
        """Raise `SamplerClosedError` if nothing is kept any more."""
        if self.closed is not None:
            raise SamplerClosedError(str(self.closed)) from self.closed

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for it to hold after something has changed.

        Raises:
            SamplerClosedError: if the replicas are or get closed.
        """
        async with self.changed:
            await self.changed.wait_for(lambda: self.closed is not None or condition())
        self.check_open()

    async def everywhere(
        self,
        act: Callable[[Replica], Awaitable[object]],
        *,
        members: Sequence[tuple[Slot, Replica]] | None = None,
        lost_on: tuple[type[Exception], ...] = (),
        spared_on: tuple[type[Exception], ...] = (),
    ) -> list[Outcome]:
        """Do it on several replicas at once; those that are lost are replaced.

        Args:
            act: what to do.
            members: on whom, one that is about to join among them; None: on all that serve.
            lost_on: errors of a replica that is not whole any more, beside those of a lost one.
            spared_on: errors of a replica that is as it was.

        Raises:
            Exception: any other error, once all have ended.
        """
        limit = self._config.update_timeout_s
        lost: tuple[type[Exception], ...] = (
            ReplicaLostError,
            SamplerClosedError,
            TimeoutError,
            *lost_on,
        )

        async def one(slot: Slot, replica: Replica) -> Outcome:
            try:
                async with asyncio.timeout(limit):
                    await act(replica)
            except spared_on as error:
                return Outcome(slot, replica, error)
            except lost as error:
                self.lose(slot, replica, error)
                return Outcome(slot, replica, error)
            return Outcome(slot, replica, None)

        asked = self.serving() if members is None else members
        results = await asyncio.gather(
            *(one(slot, replica) for slot, replica in asked), return_exceptions=True
        )
        outcomes: list[Outcome] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            outcomes.append(result)
        return outcomes

    def lose(self, slot: Slot, replica: Replica, error: Exception) -> None:
        """A replica is gone: let its requests go elsewhere, and start another one."""
        if slot.replica is not replica or self.closed is not None:
            return  # somebody else has seen it
        slot.replica = None
        slot.lost.set()
        self.losses.append(f"replica {slot.number}: {type(error).__name__}: {error}")
        ending = asyncio.create_task(self._end(replica))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        self._background(self._replace(slot, ending))

    async def pause(self) -> None:
        """Start no replica until `go_on`, and end those that are being started.

        Call it with `joining` held, so that none is about to join; or in `prepare`, for the others.
        """
        self._may_start.clear()
        others = [starting for starting in self._starting if starting is not asyncio.current_task()]
        for starting in others:
            starting.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def until_ended(self) -> None:
        """Wait until no replica that was given up holds anything."""
        await asyncio.gather(*self._ending)

    async def go_on(self) -> None:
        """Start replicas again."""
        self._may_start.set()
        await self.notify()

    async def notify(self) -> None:
        """Wake whoever waits in `until`."""
        async with self.changed:
            self.changed.notify_all()

    async def give_up(self, reason: str, error: Exception) -> None:
        """Keep nothing any more: whoever waits gets the reason."""
        self.closed = SamplerClosedError(reason)
        self.closed.__cause__ = error
        await self.notify()

    async def close(self) -> None:
        """End all replicas; may be called twice."""
        if self.closed is None:
            self.closed = SamplerClosedError("the replica set was closed")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.notify()
        replicas = [replica for _, replica in self.serving()]
        for slot in self.slots:
            slot.replica = None
            slot.lost.set()
        await asyncio.gather(*(self._end(replica) for replica in replicas))

    async def _replace(self, slot: Slot, ending: "asyncio.Task[None]") -> None:
        await asyncio.shield(ending)
        for attempt in range(1, self._config.max_failed_starts + 1):
            try:
                await self._fill(slot)
            except Exception as error:  # noqa: BLE001  (the caller's function may raise anything)
                if attempt < self._config.max_failed_starts:
                    continue
                await self.give_up(
                    f"replica {slot.number} did not start {attempt} times in a row "
                    f"(ReplicaSetConfig.max_failed_starts), last: {error}",
                    error,
                )
            break

    async def _fill(self, slot: Slot) -> None:
        """Have a replica in this slot, as soon as one may be started."""
        is_there = False
        while not is_there:
            await self._may_start.wait()
            starting = asyncio.create_task(self._start_in(slot))
            self._starting.add(starting)
            try:
                await asyncio.wait({starting})
            finally:  # a `close` meanwhile ends it too
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                self._starting.discard(starting)
            is_there = not starting.cancelled()  # by `pause`
        starting.result()
        await self.notify()

    async def _start_in(self, slot: Slot) -> None:
        """Start a replica, prepare it, and only then let it serve."""
        limit = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                replica = await self._start_replica(slot.number)
        except TimeoutError as error:
            raise TimeoutError(
                f"replica {slot.number} did not start within {limit:g} s "
                "(ReplicaSetConfig.start_timeout_s)"
            ) from error
        try:
            async with self._joining:
                await self._prepare(slot.number, replica)
                slot.lost = asyncio.Event()
                slot.replica = replica
        except BaseException:
            await self._end(replica)
            raise

    async def _end(self, replica: Replica) -> None:
        """Close one that may be half dead, in limited time and whatever it raises."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._config.health_timeout_s):
                await replica.close()

    async def _watch(self) -> None:
        """Ask every replica again and again whether it is alive."""
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            await asyncio.gather(*(self._ask(slot, replica) for slot, replica in self.serving()))

    async def _ask(self, slot: Slot, replica: Replica) -> None:
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                await replica.ping()
        except TimeoutError:
            limit = self._config.health_timeout_s
            silent = TimeoutError(
                f"no answer to ping within {limit:g} s (ReplicaSetConfig.health_timeout_s)"
            )
            self.lose(slot, replica, silent)
        except Exception as error:  # noqa: BLE001  (whatever it is, this replica does not serve)
            self.lose(slot, replica, error)

    def _background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


MAY_BREAK: tuple[type[Exception], ...] = (ValueError, RolloutError)
"""What a replica raises that is not whole any more after it has begun to change."""
