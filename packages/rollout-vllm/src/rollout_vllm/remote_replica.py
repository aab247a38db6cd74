"""A sampler in a process of an actor system, as one of several.

::

    ReplicaSet ── RemoteReplica ── your `Remote` ── actor system ── SamplerHost (its process)

The package knows no actor system: a `Remote` is the few lines that one needs. With Ray (2.60)::

    class RayRemote:
        def __init__(self, handle):
            self.handle = handle

        def submit(self, method, *args, **kwargs):
            return getattr(self.handle, method).remote(*args, **kwargs)

        def cancel(self, call):
            ray.cancel(call)

        def raised(self, error):
            return error.cause if isinstance(error, ray.exceptions.RayTaskError) else None

        def end(self):
            ray.kill(self.handle)
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Protocol, Self, cast, final

from rl_contracts.images import PromptImage
from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm.engine import InFlight
from rollout_vllm.publication import Publication
from rollout_vllm.replica import ReplicaLostError
from rollout_vllm.sleep import MemoryChange, Part


class Remote(Protocol):
    """How an actor system reaches one `SamplerHost`."""

    def submit(self, method: str, *args: object, **kwargs: object) -> Awaitable[object]:
        """Call a method of the host."""

    def cancel(self, call: Awaitable[object]) -> None:
        """Cancel such a call in the host's process, if it still runs."""

    def raised(self, error: Exception) -> Exception | None:
        """What the host's method raised, given what awaiting the call raised.

        None if the method has not raised: the host's process is gone or out of reach.
        """

    def end(self) -> None:
        """End the host's process, in whatever state it is; it may be gone."""


@final
class RemoteReplica:
    """A `rollout_vllm.replica.Replica` whose sampler lives behind a `Remote`."""

    def __init__(self, remote: Remote, *, name: str) -> None:
        self._remote = remote
        self._name = name
        self.process: int | None = None
        """Id of the host's process, on its machine; None before it was started."""

    @classmethod
    async def start(cls, remote: Remote, *, name: str) -> Self:
        """Start the host's sampler; the host's process ends if that fails.

        Args:
            remote: a host that was made, and not started.
            name: what messages call it.

        Raises:
            StartError: as `VllmSampler.start`.
            ValueError: as `VllmSampler.start`.
            ReplicaLostError: if the process is gone.
        """
        replica = cls(remote, name=name)
        try:
            replica.process = cast("int", await replica._call("start"))
        except BaseException:
            remote.end()
            raise
        return replica

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        params: SamplingParams,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        """As `VllmSampler.sample`; cancelling it frees the places over there."""
        drawn = await self._call(
            "sample",
            list(prompt_ids),
            num_samples=num_samples,
            params=params,
            images=tuple(images),
        )
        return cast("list[Completion]", drawn)

    async def check_published(self, published: Publication) -> None:
        """As `VllmSampler.check_published`."""
        await self._call("check_published", published)

    async def load_published(
        self, published: Publication, *, keep: bool, in_flight: InFlight
    ) -> None:
        """As `VllmSampler.load_published`."""
        await self._call("load_published", published, keep=keep, in_flight=in_flight)

    async def sleep(self, *, keep_weights: bool) -> MemoryChange:
        """As `VllmSampler.sleep`."""
        return cast("MemoryChange", await self._call("sleep", keep_weights=keep_weights))

    async def wake(self, parts: Sequence[Part]) -> MemoryChange:
        """As `VllmSampler.wake`."""
        return cast("MemoryChange", await self._call("wake", list(parts)))

    async def ping(self) -> PolicyVersion:
        """As `VllmSampler.ping`."""
        return cast("PolicyVersion", await self._call("ping"))

    async def close(self) -> None:
        """Close the sampler, if it can still be reached, and end the process."""
        try:
            await self._call("close")
        finally:
            self._remote.end()

    async def _call(self, method: str, *args: object, **kwargs: object) -> object:
        call = self._remote.submit(method, *args, **kwargs)
        try:
            return await call
        except asyncio.CancelledError:
            self._remote.cancel(call)
            raise
        except Exception as error:
            raised = self._remote.raised(error)
            if raised is None:
                raised = ReplicaLostError(f"{self._name} is gone: {error}")
            raise raised from error
