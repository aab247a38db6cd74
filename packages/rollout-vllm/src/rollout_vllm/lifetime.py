"""Whether a sampler is open, and what ends with it."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import final

from rollout_vllm.engine import Engine
from rollout_vllm.errors import SamplerClosedError, SamplerDiedError


@final
class Lifetime:
    """Running requests, and the reason for which there will be no more.

    ::

        open ──▶ closed     by close(), or because the engine died or an update broke off half-way
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._closed: SamplerClosedError | None = None
        self.running: set[str] = set()
        """Requests that have not returned."""

    def check_open(self) -> None:
        """Refuse to go on after the end.

        Raises:
            SamplerClosedError: with the type and the reason of the end.
        """
        if self._closed is not None:
            raise type(self._closed)(str(self._closed)) from self._closed

    @contextlib.contextmanager
    def request(self) -> Iterator[str]:
        """A request that counts as running."""
        request_id = str(next(self._numbers))
        self.running.add(request_id)
        try:
            with self.ends_with_engine():
                yield request_id
        finally:
            self.running.discard(request_id)

    @contextlib.contextmanager
    def ends_with_engine(self) -> Iterator[None]:
        """Close the sampler if the engine dies meanwhile."""
        try:
            yield
        except SamplerDiedError as error:
            if self._closed is None:
                self._closed = error
                self._engine.shutdown()
            raise

    async def end(self, error: SamplerClosedError) -> None:
        """End running requests and the engine's process for this reason; the first one stays."""
        if self._closed is not None:
            return
        self._closed = error
        # a dead engine has ended its requests itself
        with contextlib.suppress(SamplerDiedError):
            await self._engine.abort(list(self.running))
        self._engine.shutdown()
