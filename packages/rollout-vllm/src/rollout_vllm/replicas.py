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

    sleep ──▶ the devices are somebody else's: requests wait, no replica is started ──▶ wake

Knows neither processes nor Ray: it is given a function that starts replica number i. What that
returns may be a `VllmSampler` of this process, or a handle of one in an actor on another machine.
`rollout_vllm.replica_keeper` keeps them running.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, final

from rl_contracts.images import PromptImage
from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm.config import Dtype
from rollout_vllm.engine import InFlight
from rollout_vllm.errors import SamplerClosedError, SamplerDiedError, WeightUpdateError
from rollout_vllm.replica import Replica, ReplicaLostError, ReplicaSetConfig
from rollout_vllm.replica_choice import choose_replica
from rollout_vllm.replica_keeper import MAY_BREAK, ReplicaKeeper, Slot
from rollout_vllm.sleep import MemoryChange, SamplerAsleepError
from rollout_vllm.weights_sender import PublishedWeights, TensorLike, publish_weights

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (memory, under a fresh private folder)


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
        self._config = config
        self._policy_version = policy_version
        self._dtype: Dtype = dtype
        self._current: PublishedWeights | None = None
        self._folder: Path | None = None
        self._updates = asyncio.Lock()
        self._versions = asyncio.Lock()
        self._updating = False
        self._asleep = False
        self._keeper = ReplicaKeeper(
            start_replica, config, joining=self._versions, prepare=self._prepare
        )

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
            await replicas._keeper.start()
        except BaseException:
            await replicas.close()
            raise
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
        return len(self._keeper.serving())

    @property
    def losses(self) -> Sequence[str]:
        """Why each replica that was replaced had to be, oldest first."""
        return self._keeper.losses

    async def until_all_serve(self) -> None:
        """Wait until every replica answers.

        Raises:
            SamplerClosedError: if the set is or gets closed, or has given up.
        """
        await self._keeper.until(lambda: self.num_serving == self._config.num_replicas)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        params: SamplingParams,
        images: Sequence[PromptImage] = (),
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
                replica.sample(prompt_ids, num_samples=num_samples, params=params, images=images)
            )
            gone = asyncio.ensure_future(lost.wait())
            try:
                await asyncio.wait({drawing, gone}, return_when=asyncio.FIRST_COMPLETED)
                if drawing.done():
                    return drawing.result()
            except (ReplicaLostError, SamplerClosedError) as error:
                self._keeper.lose(slot, replica, error)
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
            SamplerAsleepError: if the set sleeps.
            SamplerClosedError: if the set is closed, or has given up.
        """
        async with self._updates:
            self._keeper.check_open()
            self._check_awake("load_published")
            self._updating = True
            try:
                before = await self._load_on_all(published, in_flight)
            finally:
                self._updating = False
                await self._keeper.notify()
        if before is not None and before.folder != published.folder:
            before.remove()

    async def _load_on_all(
        self, published: PublishedWeights, in_flight: InFlight
    ) -> PublishedWeights | None:
        """Bring every replica to them; returns those that they had before."""
        for _ in range(self._config.max_failed_starts):
            # one that died may be all there was, and another one is starting
            await self._keeper.until(lambda: self.num_serving > 0)
            async with self._versions:
                await self._keeper.everywhere(lambda replica: replica.check_published(published))
                # from here on a replica either has the new weights or is replaced
                errors = await self._keeper.everywhere(
                    lambda replica: replica.load_published(
                        published, keep=True, in_flight=in_flight
                    ),
                    lost_on=MAY_BREAK,
                )
                if None in errors:
                    before, self._current = self._current, published
                    self._policy_version = published.version
                    return before
            if not all(isinstance(error, ReplicaLostError | SamplerDiedError) for error in errors):
                break  # it was not for a death that they did not load, so they would not again
        raise WeightUpdateError(
            f"load_published: none of the {self._config.num_replicas} replicas could load version "
            f"{published.version}; last: {self.losses[-1]}"
        )

    async def sleep(self) -> list[MemoryChange]:
        """Give the devices to somebody else until `wake`; weights wait in the host's memory.

        Requests that run go on after `wake`, new ones wait for it. A replica that is being started
        is ended, and one that dies has ended when this returns; both are started after `wake`.

        Returns:
            For each replica the memory in use on its devices before and after.

        Raises:
            SamplerAsleepError: if the set sleeps already.
            ValueError: as `VllmSampler.sleep`.
            SamplerClosedError: if the set is closed.
        """
        async with self._updates, self._versions:
            self._keeper.check_open()
            self._check_awake("sleep")
            self._asleep = True
            await self._keeper.pause()
            changes: list[MemoryChange] = []

            async def sleep(replica: Replica) -> None:
                changes.append(await replica.sleep(keep_weights=True))

            try:
                await self._keeper.everywhere(sleep)
            except BaseException:
                await self._woken()
                raise
            await self._keeper.until_ended()
            return changes

    async def wake(self) -> list[MemoryChange]:
        """Take the devices back, and let requests go on.

        Returns:
            For each replica the memory in use on its devices before and after.

        Raises:
            ValueError: if the set does not sleep.
            SamplerClosedError: if the set is closed.
        """
        async with self._updates, self._versions:
            self._keeper.check_open()
            if not self._asleep:
                raise ValueError("wake: the replicas are awake; call sleep first")
            changes: list[MemoryChange] = []

            async def wake(replica: Replica) -> None:
                changes.append(await replica.wake())

            await self._keeper.everywhere(wake, lost_on=MAY_BREAK)
            await self._woken()
            return changes

    async def _woken(self) -> None:
        self._asleep = False
        await self._keeper.go_on()

    def _check_awake(self, method: str) -> None:
        if self._asleep:
            raise SamplerAsleepError(f"{method}: the replicas sleep; call wake first")

    async def close(self) -> None:
        """End all replicas and remove the files; may be called twice."""
        await self._keeper.close()
        if self._current is not None:
            self._current.remove()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=not self._folder.exists())

    async def _choose(
        self, prompt_ids: Sequence[int], num_samples: int
    ) -> tuple[Slot, Replica, asyncio.Event]:
        await self._keeper.until(
            lambda: self.num_serving > 0 and not self._updating and not self._asleep
        )
        serving = {slot.number: (slot, replica) for slot, replica in self._keeper.serving()}
        number = choose_replica(
            prompt_ids,
            {number: slot.running for number, (slot, _) in serving.items()},
            num_samples=num_samples,
            most_above_mean=self._config.most_above_mean,
        )
        slot, replica = serving[number]
        return slot, replica, slot.lost

    async def _prepare(self, number: int, replica: Replica) -> None:
        """Bring a replica that was started to the present version."""
        if self._current is not None:
            await replica.load_published(self._current, keep=True, in_flight="keep")
        found = await replica.ping()
        if found != self._policy_version:
            raise ReplicaLostError(
                f"replica {number} started with version {found} of the weights, "
                f"expected {self._policy_version}"
            )
