"""Batches for a training loop, while sampling goes on in the background as far as it may.

::

    loop:      next batch ──▶ train ──▶ trained(v) ──▶ publish(v) ──▶ next batch ...
                   ▲                                       │
                   │ groups in data order                  │ published(v)
               ┌───┴──────────── Scheduler ◀───────────────┘
               │ admit()            ▲ complete(keep=...) / fail()
               ▼                    │
        one asyncio task per group: await sample(ticket), then keep(group)

The loop stays in the caller's hands; this module holds what waits: the sampling tasks, their
errors and the timeouts. It knows nothing of Ray: `sample` and `publish` may call actors, or an
object in this process.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Generic, Self, final

import attrs

from async_policy.batch import Activity, Batch, GroupT
from async_policy.errors import (
    GroupLostError,
    SamplingError,
    StalledError,
    WaitTimeoutError,
)
from async_policy.schedule import ReadyGroup, Ticket
from async_policy.scheduler import Scheduler
from rl_contracts.rollout import PolicyVersion

logger = logging.getLogger(__name__)

MAX_NAMED_GROUPS = 4
"""Groups that a message names before it only counts."""


@attrs.frozen(kw_only=True)
class Timeouts:
    """How long the loop waits for others before it gives up with an error that names them."""

    batch_s: float = attrs.field(default=1800.0, validator=attrs.validators.gt(0.0))
    """Seconds that the trainer waits for a batch.

    Default: half an hour, several times what a batch of long completions takes.
    """

    publish_s: float = attrs.field(default=600.0, validator=attrs.validators.gt(0.0))
    """Seconds until all samplers have taken new weights.

    Default: ten minutes; a 235B model took 58 s in verl's published figures.
    """

    close_s: float = attrs.field(default=60.0, validator=attrs.validators.gt(0.0))
    """Seconds that cancelled sampling tasks have to end. Default: a minute."""


@final
class Rollouts(Generic[GroupT]):
    """Samples groups in the background and hands them out as batches, in the scheduler's order.

    Use it with ``async with``: on the way out every sampling task is cancelled and awaited.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        sample: Callable[[Ticket], Awaitable[GroupT]],
        oldest_version: Callable[[GroupT], PolicyVersion],
        publish: Callable[[PolicyVersion], Awaitable[None]],
        keep: Callable[[GroupT], bool] | None = None,
        timeouts: Timeouts | None = None,
        max_attempts: int = 3,
    ) -> None:
        """Bind the scheduler to what samples and publishes; starts nothing.

        Args:
            scheduler: decides what may start and what is consumed.
            sample: samples the group with the ticket's index. `GroupLostError` has it sampled
                again; any other error reaches the loop as `SamplingError`. It is cancelled when
                the rollouts are closed.
            oldest_version: version that the oldest token of a group was drawn from.
            publish: gives every sampler the weights of a version; after it returns, no token is
                drawn from older ones.
            keep: whether a group is to be trained on; one that is not is set aside, and the next
                prompt takes its place (`SchedulerConfig.refill`).
            timeouts: how long to wait; None for the defaults.
            max_attempts: how often a group is sampled, at most, when it is lost each time.

        Raises:
            ValueError: if `max_attempts` is below 1, or one of `keep` and the scheduler's `refill`
                is given without the other.
        """
        if (keep is None) != (scheduler.config.refill is None):
            given, lacking = ("keep", "SchedulerConfig.refill") if keep else ("refill", "keep")
            message = f"Rollouts: {given} has no effect without {lacking}; give both or neither"
            raise ValueError(message)
        if max_attempts < 1:
            message = f"Rollouts: expected max_attempts of at least 1, got {max_attempts}"
            raise ValueError(message)
        self._scheduler = scheduler
        self._sample = sample
        self._oldest_version = oldest_version
        self._publish = publish
        self._keep = keep
        self._timeouts = timeouts or Timeouts()
        self._max_attempts = max_attempts
        self._tasks: dict[asyncio.Task[None], Ticket] = {}
        self._started_at: dict[int, float] = {}
        self._groups: dict[int, GroupT] = {}
        self._counts: Counter[str] = Counter()  # for the next batch's `Activity`
        self._batch_at = 0.0
        self._num_publishing = 0
        self._publishing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure: SamplingError | None = None
        self._open = False

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, to read versions and to save its state."""
        return self._scheduler

    async def __aenter__(self) -> Self:
        """Open; sampling starts when the first batch is asked for."""
        self._open = True
        self._batch_at = asyncio.get_running_loop().time()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()

    async def batches(self) -> AsyncIterator[Batch[GroupT]]:
        """Every batch of the run that is left, each when its groups are complete.

        Between two batches the loop calls `trained`, and `publish` often enough for
        `max_staleness`. With ``max_staleness = 0`` sampling starts when a batch is asked for and
        is over when it is handed out, as in a synchronous loop; otherwise groups that the bound
        lets in are sampled while the loop trains.

        Raises:
            SamplingError: if sampling a group failed, now or since the last call.
            RefillError: if too few groups were kept; see `Refill.incomplete`.
            StalledError: if a version must be published before anything may be sampled.
            WaitTimeoutError: if the batch is not complete in time; names the missing groups.
        """
        while not self._scheduler.finished:
            batch = await self._next_batch()
            if batch is not None:
                yield batch

    def trained(self, version: PolicyVersion) -> None:
        """Take note that the optimizer step on the last batch is done, and led to `version`.

        From here on the scheduler's state counts the batch as consumed: a checkpoint that is
        written now belongs to the weights of `version`.
        """
        self._scheduler.trained(version)

    async def publish(self, version: PolicyVersion) -> None:
        """Give every sampler the weights of `version`, then let new groups in.

        Sampling in flight goes on meanwhile, if the samplers keep it. May run as a task beside
        the next training step; one that begins before the one before has ended waits for it.

        Raises:
            ValueError: if the version falls, or has not been trained.
            SamplingError: if sampling a group failed, now or since the last call.
            WaitTimeoutError: if the samplers do not take the weights in time.
        """
        self._check_usable()
        self._scheduler.check_publishable(version)
        self._num_publishing += 1
        publishing = asyncio.create_task(self._publish_now(version), name=f"publish {version}")
        failing = asyncio.create_task(self._failed.wait(), name="wait for a sampling error")
        try:
            await asyncio.wait(
                {publishing, failing},
                timeout=self._timeouts.publish_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not publishing.done():
                self._check_usable()
                message = (
                    f"the trainer waited {self._timeouts.publish_s:g} s for the samplers to take "
                    f"the weights of version {version} (limit: publish_s)"
                )
                raise WaitTimeoutError(message)
            publishing.result()
        finally:
            self._num_publishing -= 1
            self._changed.set()
            await self._cancel({publishing, failing}, f"publish version {version}")
        if self._scheduler.config.max_staleness > 0:
            self._start_admitted()

    async def close(self) -> None:
        """Cancel every sampling task and wait until it has ended. Safe to call again.

        Raises:
            WaitTimeoutError: if a task does not end after its cancellation; names its group.
        """
        self._open = False
        await self._cancel(set(self._tasks), "close")

    async def _next_batch(self) -> Batch[GroupT] | None:
        """The next batch, or None if the last prompts were set aside and the run is over."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        while True:
            self._check_usable()
            self._changed.clear()
            self._start_admitted()
            ready = self._scheduler.take_batch()
            if ready is not None:
                # New requests are on their way even if the loop trains without awaiting.
                await asyncio.sleep(0)
                return self._batch_of(ready, asked_at=asked_at)
            if self._scheduler.finished:
                return None
            if self._scheduler.stall_reason is not None and not self._num_publishing:
                await asyncio.sleep(0)  # a publish that was just made a task starts now
            reason = self._scheduler.stall_reason
            if reason is not None and not self._num_publishing and not self._changed.is_set():
                message = f"no batch for version {self._scheduler.trained_version}: {reason}"
                raise StalledError(message)
            try:
                async with asyncio.timeout_at(asked_at + self._timeouts.batch_s):
                    await self._changed.wait()
            except TimeoutError:
                raise WaitTimeoutError(self._late_batch(loop.time())) from None

    def _batch_of(self, ready: tuple[ReadyGroup, ...], *, asked_at: float) -> Batch[GroupT]:
        now = asyncio.get_running_loop().time()
        staleness = tuple(group.staleness for group in ready)
        activity = Activity(
            num_sampled=self._counts["sampled"],
            num_set_aside=self._counts["set aside"],
            num_redone=self._counts["redone"],
            num_partial=self._counts["partial"],
            num_in_flight=self._scheduler.num_in_flight,
            num_waiting=self._scheduler.num_waiting,
            staleness=dict(sorted(Counter(staleness).items())),
            waited_s=now - asked_at,
            elapsed_s=now - self._batch_at,
        )
        self._counts.clear()
        self._batch_at = now
        return Batch(
            version=self._scheduler.trained_version,
            tickets=tuple(group.ticket for group in ready),
            groups=tuple(self._groups.pop(group.ticket.index) for group in ready),
            staleness=staleness,
            waited_s=activity.waited_s,
            set_aside=tuple(map(self._groups.pop, self._scheduler.batch_set_aside)),
            activity=activity,
        )

    async def _publish_now(self, version: PolicyVersion) -> None:
        """One after the other: of two that overlap, the one that ends last must be the newer."""
        async with self._publishing:
            self._scheduler.check_publishable(version)
            await self._publish(version)
            self._scheduler.published(version)

    async def _sample_one(self, ticket: Ticket) -> None:
        group = await self._sample(ticket)
        keep = self._keep is None or self._keep(group)
        self._scheduler.complete(ticket, self._oldest_version(group), keep=keep)
        self._groups[ticket.index] = group
        self._counts["sampled"] += 1
        self._counts["set aside"] += not keep
        self._counts["partial"] += self._scheduler.published_version != ticket.admitted_version

    def _start_admitted(self) -> None:
        now = asyncio.get_running_loop().time()
        for ticket in self._scheduler.admit():
            task = asyncio.create_task(self._sample_one(ticket), name=f"sample {ticket}")
            self._tasks[task] = ticket
            self._started_at[ticket.index] = now
            task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Account for a sampling task that ended in any way."""
        ticket = self._tasks.pop(task)
        del self._started_at[ticket.index]
        self._changed.set()
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        self._scheduler.fail(ticket)
        if not self._open or self._failure is not None:
            if error is not None:
                logger.warning("sampling %s also failed: %r", ticket, error)
            return
        if isinstance(error, GroupLostError) and ticket.attempt + 1 < self._max_attempts:
            logger.warning("sampling %s is redone, it was lost: %s", ticket, error)
            self._counts["redone"] += 1
            self._start_admitted()
            return
        how = "was cancelled by somebody else" if error is None else f"failed: {error!r}"
        self._failure = SamplingError(f"sampling {ticket} {how}")
        self._failure.__cause__ = error
        self._failed.set()

    def _check_usable(self) -> None:
        if not self._open:
            message = "Rollouts are closed; use them inside `async with Rollouts(...) as rollouts:`"
            raise ValueError(message)
        if self._failure is not None:
            raise self._failure

    async def _cancel(self, tasks: Iterable[asyncio.Task[object]], who: str) -> None:
        """Cancel what still runs and see it end; an error is then only logged."""
        running = {task for task in tasks if not task.done()}
        for task in running:
            task.cancel()
        if not running:
            return
        done, pending = await asyncio.wait(running, timeout=self._timeouts.close_s)
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.warning("%s: after cancellation: %r", task.get_name(), error)
        if pending:
            names = sorted(task.get_name() for task in pending)
            message = (
                f"{who} waited {self._timeouts.close_s:g} s for {_listed(names)} to end after "
                f"cancellation (limit: close_s)"
            )
            raise WaitTimeoutError(message)

    def _late_batch(self, now: float) -> str:
        scheduler = self._scheduler
        late = [t for t in scheduler.in_flight if t.step == scheduler.trained_version]
        if not late and (scheduler.config.order == "completion" or scheduler.config.refill):
            late = list(scheduler.in_flight)  # any of them may complete the batch
        names = [f"{t}, for {now - self._started_at[t.index]:.1f} s" for t in late]
        who = (
            f"{scheduler.num_waiting} of {scheduler.config.groups_per_step} groups are there, and "
            f"{len(late)} are still being sampled: {_listed(names)}"
            if late
            else "none of its groups may start before the publish that is under way ends"
        )
        return (
            f"the trainer waited {self._timeouts.batch_s:g} s for the batch of version "
            f"{scheduler.trained_version} (limit: batch_s): {who}"
        )


def _listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    shown = "; ".join(names[:MAX_NAMED_GROUPS])
    more = len(names) - MAX_NAMED_GROUPS
    return f"{shown}; and {more} more" if more > 0 else shown
