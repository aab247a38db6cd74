"""Trainer and samplers on the same devices: one side computes, the other waits without memory.

    sample, sample, sample ──▶ all done ──▶ samplers sleep ──▶ weights of the trainer come
       ▲                                                                     │ score, train
       ├── samplers wake ◀── weights of the trainer go to the host ◀─────────┤
       │                                                                     │ or publish:
       └── caches wake ◀── the same ◀── the trainer sends ◀── weights wake ◀─┘

Who comes first is decided here and nowhere else: a loop calls trainer and samplers as if each had
devices of its own. Requests that run are never interrupted by a turn; new ones wait while the
trainer computes or is about to.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

Side = Literal["sampler", "trainer"]


@dataclass(kw_only=True, slots=True)
class Turns:
    """Whose turn it is."""

    hand_over: Callable[[Side], Awaitable[None]]
    """Gives all devices to this side; awaited while neither computes."""

    owner: Side
    """Who has the devices now."""

    _handed_over_s: float = 0.0
    _num_sampling: int = 0
    _num_wanted: int = 0  # trainings that run or wait
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _training: asyncio.Lock = field(default_factory=asyncio.Lock)
    _handing: "asyncio.Task[None] | None" = None

    @contextlib.asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """The body runs while the samplers have the devices; many may at a time."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._num_wanted)
            await self._give("sampler")
            self._num_sampling += 1
        try:
            yield
        finally:
            self._num_sampling -= 1
            async with self._changed:
                self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The body runs while the trainer has the devices, one at a time."""
        self._num_wanted += 1
        try:
            async with self._training:
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._num_sampling)
                    await self._give("trainer")
                yield
        finally:
            self._num_wanted -= 1
            async with self._changed:
                self._changed.notify_all()

    def take_seconds(self) -> float:
        """Seconds that hand-overs took since this was last asked, those with weights included."""
        seconds, self._handed_over_s = self._handed_over_s, 0.0
        return seconds

    async def publish(self, load: Callable[[], Awaitable[None]]) -> None:
        """Hand the devices over to the samplers so that they have the trainer's weights.

        Args:
            load: does so, beginning with devices that are the trainer's.
        """
        self._num_wanted += 1
        try:
            async with self._training, self._changed:
                await self._changed.wait_for(lambda: not self._num_sampling)
                await self._give("trainer")
                await self._start("sampler", load())
        finally:
            self._num_wanted -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _give(self, side: Side) -> None:
        """Hand the devices over; once that has failed, nobody gets them and all hear why.

        Whoever asked may be cancelled meanwhile: the devices then arrive all the same, since half
        of them would be of no use to anybody.
        """
        if self._handing is not None:
            await asyncio.shield(self._handing)
        if self.owner != side:
            await self._start(side, self.hand_over(side))

    async def _start(self, side: Side, moving: Awaitable[None]) -> None:
        self._handing = asyncio.create_task(
            self._hand_over(side, moving), name=f"devices to {side}"
        )
        await asyncio.shield(self._handing)

    async def _hand_over(self, side: Side, moving: Awaitable[None]) -> None:
        begin = time.monotonic()
        await moving
        self.owner = side
        self._handed_over_s += time.monotonic() - begin
