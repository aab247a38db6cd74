"""Several samplers as one: requests are spread, the dead are replaced, versions change together.

::

    sample ─▶ the replica that knows the prompt's beginning and has room ─▶ completions
              │ it died: the same prompt goes to another one
              ▼
    serving ── died, or no answer ──▶ down ── start ──▶ starting ── load the present version ─┐
       ▲                                                                                      │
       └──────────────────────────────────────────────────────────────────────────────────────┘

    load_published: every replica checks ── one says no ──▶ ValueError, none was touched
                    every replica loads  ── one breaks ──▶ it is replaced, the others go on
                                         ── all died ──▶ the first that is back loads them
                    meanwhile no new request starts, so none meets two versions by chance

Knows neither processes nor Ray: it is given a function that starts replica number i. What that
returns may be a `VllmSampler` of this process, or a handle of one in an actor on another machine.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, final

from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm.config import Dtype
from rollout_vllm.engine import InFlight
from rollout_vllm.errors import (
    RolloutError,
    SamplerClosedError,
    SamplerDiedError,
    WeightUpdateError,
)
from rollout_vllm.gathered import gathered
from rollout_vllm.replica import Replica, ReplicaLostError, ReplicaSetConfig
from rollout_vllm.replica_choice import choose_replica
from rollout_vllm.weights_sender import PublishedWeights, TensorLike, publish_weights

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (memory, under a fresh private folder)


class _Slot:
    """The place of one replica."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.replica: Replica | None = None
        self.running = 0
        self.lost = asyncio.Event()


@final
class ReplicaSet:
    """Several samplers as one `Sampler` and `WeightSink`. Made with `ReplicaSet.start`."""

    def __init__(
        self,
        start_replica: Callable[[int], Awaitable[Replica]],
        config: ReplicaSetConfig,
        *,
        policy_version: PolicyVersion,
        dtype: Dtype,
    ) -> None:
        self._start_replica = start_replica
        self._config = config
        self._policy_version = policy_version
        self._dtype: Dtype = dtype
        self._slots = [_Slot(number) for number in range(config.num_replicas)]
        self._current: PublishedWeights | None = None
        self._folder: Path | None = None
        self._updates = asyncio.Lock()
        self._versions = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._updating = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed: SamplerClosedError | None = None
        self.losses: list[str] = []
        """Why each replica that was replaced had to be, oldest first."""

    @classmethod
    async def start(
        cls,
        start_replica: Callable[[int], Awaitable[Replica]],
        config: ReplicaSetConfig,
        *,
        policy_version: PolicyVersion,
        dtype: Dtype,
    ) -> Self:
        """Start all replicas at once, and wait for them.

        Args:
            start_replica: starts replica number i; called again when it has died. It must start
                with the weights of `policy_version` every time, and best with `replica_config`.
            config: how many, and when one counts as dead.
            policy_version: optimizer steps behind the weights that a replica starts with.
            dtype: type in which the replicas compute.

        Raises:
            Exception: whatever `start_replica` raised; the others have been closed.
            TimeoutError: if a replica does not start in time.
        """
        replicas = cls(start_replica, config, policy_version=policy_version, dtype=dtype)
        try:
            await gathered(replicas._fill(slot) for slot in replicas._slots)
        except BaseException:
            await replicas.close()
            raise
        replicas._background(replicas._watch())
        return replicas

    async def __aenter__(self) -> Self:
        """The set itself."""
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        await self.close()

    @property
    def policy_version(self) -> PolicyVersion:
        """Version of the weights that the next token will be drawn from."""
        return self._policy_version

    @property
    def num_serving(self) -> int:
        """Replicas that answer now."""
        return len(self._serving())

    async def until_all_serve(self) -> None:
        """Wait until every replica answers.

        Raises:
            SamplerClosedError: if the set is or gets closed, or has given up.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._closed is not None or self.num_serving == len(self._slots)
            )
        self._check_open()

    async def sample(
        self, prompt_ids: Sequence[int], *, num_samples: int, params: SamplingParams
    ) -> list[Completion]:
        """Draw `num_samples` completions of one prompt, as `VllmSampler.sample`.

        If the replica dies meanwhile, another one draws them all again.

        Raises:
            ValueError: as `VllmSampler.sample`.
            GenerationError: as `VllmSampler.sample`.
            SamplerClosedError: if the set is or gets closed, or has given up.
        """
        while True:
            slot, replica, lost = await self._choose(prompt_ids, num_samples)
            slot.running += num_samples
            drawing = asyncio.ensure_future(
                replica.sample(prompt_ids, num_samples=num_samples, params=params)
            )
            gone = asyncio.ensure_future(lost.wait())
            try:
                await asyncio.wait({drawing, gone}, return_when=asyncio.FIRST_COMPLETED)
                if drawing.done():
                    return drawing.result()
            except (ReplicaLostError, SamplerClosedError) as error:
                self._lose(slot, replica, error)
            finally:
                slot.running -= num_samples
                drawing.cancel()
                gone.cancel()

    async def load_weights(
        self,
        weights: Iterable[tuple[str, TensorLike]],
        *,
        version: PolicyVersion,
        in_flight: InFlight = "keep",
    ) -> None:
        """Take new weights from this process: publishes files of them, then `load_published`.

        The files stay in shared memory until the next version is there: a replica that dies is
        brought to them. So replicas on other machines need `load_published`, and a disk.

        Raises:
            ValueError: as `load_published`.
            TypeError: if something is not a tensor.
            WeightUpdateError: as `load_published`.
            SamplerClosedError: as `load_published`.
        """
        if self._folder is None:  # made when it is needed: a killed process leaves it behind
            self._folder = Path(tempfile.mkdtemp(prefix="rollout-vllm-", dir=_SHARED_MEMORY))
        published = publish_weights(
            weights, version=version, folder=self._folder, dtype=self._dtype
        )
        try:
            await self.load_published(published, in_flight=in_flight)
        except BaseException:
            published.remove()
            raise

    async def load_published(
        self, published: PublishedWeights, *, in_flight: InFlight = "keep"
    ) -> None:
        """Bring every replica to new weights, or none.

        New requests wait meanwhile. The files belong to the set from now on: it removes them when
        the next version is there, or when it closes.

        Args:
            published: files that every replica sees.
            in_flight: what becomes of running requests, see `rollout_vllm.in_flight`.

        Raises:
            ValueError: if one replica refuses them; none was touched.
            WeightUpdateError: if no replica could load them; those that broke are replaced by ones
                with the weights before. If all died meanwhile, those that come back are tried,
                `ReplicaSetConfig.max_failed_starts` times in all.
            SamplerClosedError: if the set is closed, or has given up.
        """
        async with self._updates:
            self._updating = True
            try:
                before = await self._load_on_all(published, in_flight)
            finally:
                self._updating = False
                await self._notify()
        if before is not None and before.folder != published.folder:
            before.remove()

    async def _load_on_all(
        self, published: PublishedWeights, in_flight: InFlight
    ) -> PublishedWeights | None:
        """Bring every replica to them; returns those that they had before."""
        for _ in range(self._config.max_failed_starts):
            await self._until_one_serves()
            async with self._versions:
                await self._everywhere(lambda replica: replica.check_published(published))
                # from here on a replica either has the new weights or is replaced
                errors = await self._everywhere(
                    lambda replica: replica.load_published(
                        published, keep=True, in_flight=in_flight
                    ),
                    lost_on=(ValueError, RolloutError),
                )
                if None in errors:
                    before, self._current = self._current, published
                    self._policy_version = published.version
                    return before
            if not all(isinstance(error, ReplicaLostError | SamplerDiedError) for error in errors):
                break  # it was not for a death that they did not load, so they would not again
        raise WeightUpdateError(
            f"load_published: none of the {len(self._slots)} replicas could load version "
            f"{published.version}; last: {self.losses[-1]}"
        )

    async def _until_one_serves(self) -> None:
        """Wait for a replica: one that died may be all there was, and another one is starting."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed is not None or self._serving())
        self._check_open()

    async def close(self) -> None:
        """End all replicas and remove the files; may be called twice."""
        if self._closed is None:
            self._closed = SamplerClosedError("the replica set was closed")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._notify()
        replicas = [slot.replica for slot in self._slots if slot.replica is not None]
        for slot in self._slots:
            slot.replica = None
            slot.lost.set()
        await asyncio.gather(*(self._end(replica) for replica in replicas))
        if self._current is not None:
            self._current.remove()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=not self._folder.exists())

    def _serving(self) -> list[tuple[_Slot, Replica]]:
        return [(slot, slot.replica) for slot in self._slots if slot.replica is not None]

    def _check_open(self) -> None:
        if self._closed is not None:
            raise SamplerClosedError(str(self._closed)) from self._closed

    async def _choose(
        self, prompt_ids: Sequence[int], num_samples: int
    ) -> tuple[_Slot, Replica, asyncio.Event]:
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._closed is not None or (self._serving() and not self._updating)
            )
        self._check_open()
        serving = {slot.number: (slot, replica) for slot, replica in self._serving()}
        number = choose_replica(
            prompt_ids,
            {number: slot.running for number, (slot, _) in serving.items()},
            num_samples=num_samples,
            most_above_mean=self._config.most_above_mean,
        )
        slot, replica = serving[number]
        return slot, replica, slot.lost

    async def _everywhere(
        self,
        act: Callable[[Replica], Awaitable[None]],
        *,
        lost_on: tuple[type[Exception], ...] = (),
    ) -> list[Exception | None]:
        """Do it on all that serve at once; those that are lost are replaced, with these errors."""
        limit = self._config.update_timeout_s
        lost: tuple[type[Exception], ...] = (
            ReplicaLostError,
            SamplerClosedError,
            TimeoutError,
            *lost_on,
        )
        errors: list[Exception | None] = []

        async def one(slot: _Slot, replica: Replica) -> None:
            try:
                async with asyncio.timeout(limit):
                    await act(replica)
            except lost as error:
                self._lose(slot, replica, error)
                errors.append(error)
            else:
                errors.append(None)

        results = await asyncio.gather(
            *(one(slot, replica) for slot, replica in self._serving()), return_exceptions=True
        )
        for result in results:
            if result is not None:
                raise result
        return errors

    def _lose(self, slot: _Slot, replica: Replica, error: Exception) -> None:
        """A replica is gone: let its requests go elsewhere, and start another one."""
        if slot.replica is not replica or self._closed is not None:
            return  # somebody else has seen it
        slot.replica = None
        slot.lost.set()
        self.losses.append(f"replica {slot.number}: {type(error).__name__}: {error}")
        self._background(self._replace(slot, replica))

    async def _replace(self, slot: _Slot, replica: Replica) -> None:
        await self._end(replica)
        for attempt in range(1, self._config.max_failed_starts + 1):
            try:
                await self._fill(slot)
            except Exception as error:  # noqa: BLE001  (the caller's function may raise anything)
                if attempt < self._config.max_failed_starts:
                    continue
                self._closed = SamplerClosedError(
                    f"replica {slot.number} did not start {attempt} times in a row "
                    f"(ReplicaSetConfig.max_failed_starts), last: {error}"
                )
                self._closed.__cause__ = error
            break
        await self._notify()

    async def _fill(self, slot: _Slot) -> None:
        """Start a replica, bring it to the present version, and only then let it serve."""
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
            async with self._versions:
                if self._current is not None:
                    async with asyncio.timeout(self._config.update_timeout_s):
                        await replica.load_published(self._current, keep=True, in_flight="keep")
                self._check_present(slot, await replica.ping())
                slot.lost = asyncio.Event()
                slot.replica = replica
        except BaseException:
            await self._end(replica)
            raise
        await self._notify()

    async def _end(self, replica: Replica) -> None:
        """Close one that may be half dead, in limited time and whatever it raises."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._config.health_timeout_s):
                await replica.close()

    def _check_present(self, slot: _Slot, found: PolicyVersion) -> None:
        if found != self._policy_version:
            raise ReplicaLostError(
                f"replica {slot.number} started with version {found} of the weights, "
                f"expected {self._policy_version}"
            )

    async def _watch(self) -> None:
        """Ask every replica again and again whether it is alive."""
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            await asyncio.gather(*(self._ask(slot, replica) for slot, replica in self._serving()))

    async def _ask(self, slot: _Slot, replica: Replica) -> None:
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                await replica.ping()
        except TimeoutError:
            limit = self._config.health_timeout_s
            silent = TimeoutError(
                f"no answer to ping within {limit:g} s (ReplicaSetConfig.health_timeout_s)"
            )
            self._lose(slot, replica, silent)
        except Exception as error:  # noqa: BLE001  (whatever it is, this replica does not serve)
            self._lose(slot, replica, error)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
