"""Whether a request may start, and go on: asked by the sampler's methods and by its server."""

import contextlib
from collections.abc import Iterator
from typing import final

from rl_contracts.rollout import PolicyVersion
from rollout_vllm.lifetime import Lifetime
from rollout_vllm.weight_updates import WeightUpdates


@final
class Admission:
    """Lets requests in while the sampler is open and awake."""

    def __init__(self, lifetime: Lifetime, weights: WeightUpdates) -> None:
        self._lifetime = lifetime
        self._weights = weights

    @property
    def policy_version(self) -> PolicyVersion:
        """Version of the weights that the next token will be drawn from."""
        return self._weights.policy_version

    def check_open(self) -> None:
        """Refuse to go on after the end.

        Raises:
            SamplerClosedError: with the type and the reason of the end.
        """
        self._lifetime.check_open()

    def check(self) -> None:
        """Refuse a request that nobody would answer.

        Raises:
            SamplerClosedError: if the sampler is closed.
            SamplerAsleepError: if it sleeps.
        """
        self._lifetime.check_open()
        self._weights.sleep_state.check_sample()

    @contextlib.contextmanager
    def request(self) -> Iterator[str]:
        """A request that counts as running, under a name that the engine knows it by."""
        with self._lifetime.request() as request_id:
            yield request_id
