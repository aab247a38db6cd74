"""Where a set of replicas gets its weights, as often as it needs them.

A replica that died comes back with the weights of the model's folder. A source sends it the newest
ones, which need not be those that the set was given last: whoever trains keeps no older ones.

==================  ==========================================  =================================
source              sends                                       version
==================  ==========================================  =================================
`PublishedFiles`    nothing: the files lie where they lie       always the same
a trainer's own     what it has now, by a `WeightStream`        that of the last optimizer step
==================  ==========================================  =================================
"""

import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, final

from rollout_vllm.publication import Publication
from rollout_vllm.weights_sender import PublishedWeights


class WeightSource(Protocol):
    """What a `rollout_vllm.replicas.ReplicaSet` takes weights from."""

    @property
    def shares_devices(self) -> bool:
        """Whether it needs the replicas' devices to send: they sleep while it comes and goes."""

    async def take_devices(self) -> None:
        """Come onto the devices; asked for only while they are the replicas', who sleep."""

    async def leave_devices(self) -> None:
        """Leave them to the replicas; also after `take_devices` failed with a part of it there."""

    def offering(self) -> AbstractAsyncContextManager[Publication]:
        """An offer of the present version, which stays the present one inside of the context."""

    def send(self, replicas: Sequence[int]) -> Coroutine[None, None, None]:
        """Send what is offered, once; returns when each of these replicas has it, or raises."""


@final
class PublishedFiles:
    """Files that all replicas see, as a source."""

    shares_devices = False

    def __init__(self, published: PublishedWeights) -> None:
        self.published = published

    async def take_devices(self) -> None:
        """Files need no device."""

    async def leave_devices(self) -> None:
        """Files need no device."""

    @contextlib.asynccontextmanager
    async def offering(self) -> AsyncIterator[Publication]:
        """The files."""
        yield self.published

    async def send(self, replicas: Sequence[int]) -> None:
        """Nothing: each replica reads."""
