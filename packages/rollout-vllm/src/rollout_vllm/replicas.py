"""Several samplers as one: requests are spread, the dead are replaced, versions change together.

::

    sample ─▶ the replica that knows the prompt's beginning and has room ─▶ completions
              │ it died: the same prompt goes to another one
              ▼
    serving ── died, or no answer ──▶ down ── start ──▶ starting ── load the present version ─┐
       ▲                                                                                      │
       └──────────────────────────────────────────────────────────────────────────────────────┘

    load_from: every replica checks   ── one says no ──▶ ValueError, none was touched
               every replica receives ── one breaks ──▶ it is replaced, the others go on
               meanwhile no new request starts, so none meets two versions by chance

    sleep ──▶ the devices are somebody else's: requests wait, no replica is started ──▶ wake

Knows neither processes nor Ray: it is given a function that starts replica number i. What that
returns may be a `VllmSampler` of this process, or a handle of one in an actor on another machine.
`rollout_vllm.replica_keeper` keeps them running, `rollout_vllm.replica_updates` at one version.
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
from rollout_vllm.errors import SamplerClosedError
from rollout_vllm.replica import Replica, ReplicaLostError, ReplicaSetConfig
from rollout_vllm.replica_choice import choose_replica
from rollout_vllm.replica_keeper import Slot
from rollout_vllm.replica_updates import ReplicaUpdates
from rollout_vllm.sleep import MemoryChange
from rollout_vllm.weight_source import PublishedFiles, WeightSource
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
        self._dtype: Dtype = dtype
        self._folder: Path | None = None
        self._updates = ReplicaUpdates(start_replica, config, policy_version=policy_version)
        self._keeper = self._updates.keeper

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
        return self._updates.policy_version

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
        """Bring every replica to files that all of them see: `load_from` them.

        The files belong to the set from now on: it removes them when the next version is there, or
        when it closes.

        Raises:
            ValueError: as `load_from`.
            WeightUpdateError: as `load_from`.
            SamplerAsleepError: if the set sleeps.
            SamplerClosedError: as `load_from`.
        """
        await self.load_from(PublishedFiles(published), in_flight=in_flight)

    async def load_from(self, source: WeightSource, *, in_flight: InFlight = "keep") -> None:
        """Bring every replica to the weights that the source has, or none.

        New requests wait meanwhile. A replica that is started later is sent what the source has
        then; if that is newer than what the others have, all of them are.

        With a source on the replicas' devices the set may sleep, and is awake afterwards.

        Args:
            source: belongs to the set until the next one does, and may be asked at any moment.
            in_flight: what becomes of running requests, see `rollout_vllm.in_flight`.

        Raises:
            ValueError: if one replica refuses the weights; none was touched.
            WeightUpdateError: if no replica could load them; those that broke are replaced by ones
                with the weights before. If all died meanwhile, those that come back are tried,
                `ReplicaSetConfig.max_failed_starts` times in all.
            Exception: whatever the source raised, if it was not for a replica that died.
            SamplerAsleepError: if the set sleeps, and the source does not share its devices.
            SamplerClosedError: if the set is closed, or has given up.
        """
        before = await self._updates.load_from(source, in_flight)
        if isinstance(before, PublishedFiles) and not is_same(before, source):
            before.published.remove()

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
        return await self._updates.sleep()

    async def wake(self) -> list[MemoryChange]:
        """Take the devices back, and let requests go on.

        Returns:
            For each replica the memory in use on its devices before and after.

        Raises:
            ValueError: if the set does not sleep.
            SamplerClosedError: if the set is closed.
        """
        return await self._updates.wake()

    async def close(self) -> None:
        """End all replicas and remove the files; may be called twice."""
        await self._keeper.close()
        if isinstance(self._updates.source, PublishedFiles):
            self._updates.source.published.remove()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=not self._folder.exists())

    async def _choose(
        self, prompt_ids: Sequence[int], num_samples: int
    ) -> tuple[Slot, Replica, asyncio.Event]:
        await self._keeper.until(
            lambda: self.num_serving > 0 and not self._updates.updating and not self._updates.asleep
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


def is_same(files: PublishedFiles, source: WeightSource) -> bool:
    """Whether both are the same files."""
    return isinstance(source, PublishedFiles) and files.published.folder == source.published.folder
