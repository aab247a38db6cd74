"""One version of the weights on all replicas of a set, and devices that it shares with its source.

::

    load_from: every replica checks   ── one says no ──▶ ValueError, none was touched
               every replica receives ── one died before ──▶ again, with those that are left
                                      ── one breaks ──▶ it is replaced, the others go on
                                      ── all broke ──▶ the first that is back receives
               meanwhile no new request starts, so none meets two versions by chance

    prepare:   a replica that was started receives what the source has now; if that is newer than
               what the others have, all receive it

    a source on the replicas' devices:

    (sleep, the source comes) ─▶ wake weights ─▶ receive ─▶ the source leaves ─▶ wake caches

For `rollout_vllm.replicas.ReplicaSet`, which spreads the requests.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import final

from rl_contracts.rollout import PolicyVersion
from rollout_vllm.engine import InFlight
from rollout_vllm.errors import SamplerDiedError, WeightUpdateError
from rollout_vllm.publication import Publication
from rollout_vllm.replica import Replica, ReplicaLostError, ReplicaSetConfig
from rollout_vllm.replica_keeper import MAY_BREAK, Outcome, ReplicaKeeper, Slot
from rollout_vllm.sleep import PARTS, MemoryChange, SamplerAsleepError
from rollout_vllm.weight_source import WeightSource

Member = tuple[Slot, Replica]
"""A replica and its place."""


@final
class ReplicaUpdates:
    """See `ReplicaSet.load_from`, `ReplicaSet.sleep` and `ReplicaSet.wake`."""

    def __init__(
        self,
        start_replica: Callable[[int], Awaitable[Replica]],
        config: ReplicaSetConfig,
        *,
        policy_version: PolicyVersion,
    ) -> None:
        self._config = config
        self._one_at_a_time = asyncio.Lock()
        self._versions = asyncio.Lock()  # held while replicas change, or one joins
        self.policy_version = policy_version
        """Version of the weights that the next token will be drawn from."""

        self.source: WeightSource | None = None
        """Where it came from; None: from the model's folder."""

        self.updating = 0
        """Changes of the version that new requests wait for."""

        self.asleep = False
        """Whether the devices are somebody else's."""

        self.keeper = ReplicaKeeper(
            start_replica, config, joining=self._versions, prepare=self._prepare
        )
        """The replicas."""

    async def load_from(self, source: WeightSource, in_flight: InFlight) -> WeightSource | None:
        """Bring every replica to what the source has now; returns the source before it."""
        async with self._one_at_a_time:
            self.keeper.check_open()
            if not source.shares_devices:
                self._check_awake("load")
            self.updating += 1
            try:
                return await self._load_on_all(source, in_flight)
            finally:
                self.updating -= 1
                await self.keeper.notify()

    async def sleep(self) -> list[MemoryChange]:
        """See `ReplicaSet.sleep`."""
        async with self._one_at_a_time, self._versions:
            self.keeper.check_open()
            self._check_awake("sleep")
            changes: list[MemoryChange] = []
            await self._fall_asleep(self.keeper.serving(), changes)
            return changes

    async def wake(self) -> list[MemoryChange]:
        """See `ReplicaSet.wake`."""
        async with self._one_at_a_time, self._versions:
            self.keeper.check_open()
            if not self.asleep:
                raise ValueError("wake: the replicas are awake; call sleep first")
            changes: list[MemoryChange] = []

            async def wake(replica: Replica) -> None:
                changes.append(await replica.wake(PARTS))

            await self.keeper.everywhere(wake, lost_on=MAY_BREAK)
            await self._woken()
            return changes

    async def _load_on_all(self, source: WeightSource, in_flight: InFlight) -> WeightSource | None:
        before = self.source
        failed: list[Outcome] = []
        what = "what was never offered"
        for _ in range(self._config.max_failed_starts):
            # one that died may be all there was, and another one is starting
            await self.keeper.until(lambda: bool(self.keeper.serving()) or self.asleep)
            async with self._versions, self._room_for(source, None):
                members = self.keeper.serving()
                if not members:
                    continue  # they died asleep
                async with source.offering() as offered:
                    what = f"version {offered.version}"
                    failed = await self._send(source, offered, members, in_flight)
                if len(failed) < len(members):
                    return before
            if not any(is_death(outcome.error) for outcome in failed):
                break  # it was not for a death that they did not load, so they would not again
        last = failed[-1] if failed else None
        why = (
            f"replica {last.slot.number}: {type(last.error).__name__}: {last.error}" if last else ""
        )
        raise WeightUpdateError(
            f"load: none of the {self._config.num_replicas} replicas could load {what}; last: "
            f"{why or self.keeper.losses[-1]}"
        ) from (last.error if last else None)

    async def _send(
        self,
        source: WeightSource,
        offered: Publication,
        members: Sequence[Member],
        in_flight: InFlight,
    ) -> list[Outcome]:
        """Let these replicas check and receive it; returns those that have not got it, and why.

        If any has got it, it is the set's version from then on, and who has not is replaced.
        """
        checked = await self.keeper.everywhere(
            lambda replica: replica.check_published(offered), members=members
        )
        members = [(outcome.slot, outcome.replica) for outcome in checked if outcome.error is None]
        gone = [outcome for outcome in checked if outcome.error is not None]
        if not members:
            return gone

        async def load(replica: Replica) -> None:
            try:
                await replica.load_published(offered, keep=True, in_flight=in_flight)
            except Exception as error:
                # a sender that waits for all of them need not wait for this one
                await asyncio.to_thread(offered.refuse, f"a replica did not load them: {error}")
                raise

        numbers = [slot.number for slot, _ in members]
        sending = asyncio.create_task(source.send(numbers))
        try:
            # from here on a replica either has the new weights, or has not begun, or is replaced
            outcomes = await self.keeper.everywhere(
                load, members=members, lost_on=MAY_BREAK, spared_on=(ConnectionError,)
            )
        except BaseException:
            await asyncio.to_thread(offered.refuse, "the update was given up")
            raise
        finally:
            (sent,) = await asyncio.gather(sending, return_exceptions=True)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if len(failed) < len(members):
            self.policy_version, self.source = offered.version, source
            for outcome in failed:
                if outcome.error is not None:
                    self.keeper.lose(outcome.slot, outcome.replica, outcome.error)
        failed += gone
        if isinstance(sent, BaseException) and not any(is_death(one.error) for one in failed):
            raise sent  # it was not for a replica's death that it broke off
        return failed

    async def _prepare(self, number: int, replica: Replica) -> None:
        """Bring a replica that was started to the present version; `joining` is held."""
        if self.source is not None:
            source, member = self.source, (self.keeper.slots[number], replica)
            async with self._room_for(source, member), source.offering() as offered:
                members = [member]
                newer = offered.version != self.policy_version
                if newer:
                    members += self.keeper.serving()
                self.updating += newer  # `load_from` may count too, and wait for this to end
                try:
                    failed = await self._send(source, offered, members, "keep")
                finally:
                    self.updating -= newer
                    await self.keeper.notify()
            raise_of(failed, member)
        async with asyncio.timeout(self._config.health_timeout_s):
            found = await replica.ping()
        if found != self.policy_version:
            raise ReplicaLostError(
                f"replica {number} started with version {found} of the weights, "
                f"expected {self.policy_version}"
            )

    @contextlib.asynccontextmanager
    async def _room_for(self, source: WeightSource, joining: Member | None) -> AsyncIterator[None]:
        """Weights of the source and of the replicas are on the devices that they share, if so.

        Afterwards the devices are the replicas'.
        """
        if not source.shares_devices:
            yield
            return

        joined = [] if joining is None else [joining]
        with_weights: list[Replica] = []

        def check(outcomes: Sequence[Outcome]) -> None:
            try:
                raise_of(outcomes, joining)
            except Exception:
                joined.clear()  # nothing more is asked of it
                raise

        async def everywhere(act: Callable[[Replica], Awaitable[None]]) -> None:
            members = [*self.keeper.serving(), *joined]
            check(await self.keeper.everywhere(act, members=members, lost_on=MAY_BREAK))

        async def wake_weights(replica: Replica) -> None:
            await replica.wake(("weights",))
            with_weights.append(replica)

        async def wake_rest(replica: Replica) -> None:
            await replica.wake(("kv_cache",) if replica in with_weights else PARTS)

        is_there = self.asleep
        slept: list[Outcome] = []
        if not is_there:
            slept = await self._fall_asleep([*self.keeper.serving(), *joined], [])
        try:
            check(slept)  # the device of one that does not sleep may be full
            if not is_there:
                is_there = True  # a part of it may be, if it fails
                await source.take_devices()
            await everywhere(wake_weights)
            yield
        finally:
            if is_there:
                await self._leave(source)
            try:
                await everywhere(wake_rest)
            finally:
                await self._woken()

    async def _leave(self, source: WeightSource) -> None:
        try:
            await source.leave_devices()
        except Exception as error:
            await self.keeper.give_up("the weights' source did not leave the devices", error)
            raise

    async def _fall_asleep(
        self, members: Sequence[Member], changes: list[MemoryChange]
    ) -> list[Outcome]:
        self.asleep = True
        await self.keeper.pause()

        async def sleep(replica: Replica) -> None:
            changes.append(await replica.sleep(keep_weights=True))

        try:
            outcomes = await self.keeper.everywhere(sleep, members=members)
        except BaseException:
            await self._woken()
            raise
        await self.keeper.until_ended()
        return outcomes

    async def _woken(self) -> None:
        self.asleep = False
        await self.keeper.go_on()

    def _check_awake(self, method: str) -> None:
        if self.asleep:
            raise SamplerAsleepError(f"{method}: the replicas sleep; call wake first")


def is_death(error: Exception | None) -> bool:
    """Whether a replica is gone or hangs, rather than unable."""
    return isinstance(error, ReplicaLostError | SamplerDiedError | TimeoutError)


def raise_of(outcomes: Sequence[Outcome], member: Member | None) -> None:
    """Raise what went wrong with this one."""
    for outcome in outcomes:
        if member is not None and outcome.replica is member[1] and outcome.error is not None:
            raise outcome.error
