"""Sleep and wake by parts: the engine's memory for somebody else, while it has nothing to do.

::

    awake ── sleep(keep_weights=True) ──▶ asleep: weights on the host, no caches
      ▲                                     │ wake(("weights",)), later wake(("kv_cache",))
      └─────────────────────────────────────┘   or both at once

    awake ── sleep(keep_weights=False) ─▶ asleep: no weights, no caches
      ▲                                     │ wake(("weights",)): their memory, not their values
      │                                     │ load_published
      └──────────── wake(("kv_cache",)) ────┘
"""

from collections.abc import Sequence
from typing import Literal, final

import attrs

from rollout_vllm.errors import RolloutError

Part = Literal["weights", "kv_cache"]
"""What can be woken by itself."""

PARTS: tuple[Part, ...] = ("weights", "kv_cache")


class SamplerAsleepError(RolloutError):
    """The sampler sleeps; wake it."""


@attrs.frozen(kw_only=True)
class MemoryChange:
    """Memory of the engine's devices, all processes on them counted, before and after.

    With data parallelism that of the first engine's devices: vLLM asks it alone.
    """

    used_before: int
    """Bytes, summed over the engine's devices."""

    used_after: int
    """Bytes, summed over the engine's devices."""


@final
class SleepState:
    """Which parts sleep, and what may be done meanwhile."""

    def __init__(self, *, possible: bool, device: str) -> None:
        self._possible = possible
        self._device = device
        self.asleep: frozenset[Part] = frozenset()
        self._weights_lost = False

    def check_sleep(self) -> None:
        """Refuse where nothing would sleep.

        Raises:
            ValueError: if the engine was not started for it.
            SamplerAsleepError: if it sleeps already.
        """
        if not self._possible:
            why = (
                "on the CPU vLLM's sleep does nothing; close the sampler to free its memory"
                if self._device == "cpu"
                else "start the sampler with enable_sleep = True"
            )
            raise ValueError(f"sleep: VllmConfig.enable_sleep is False: {why}")
        if self.asleep:
            raise SamplerAsleepError("sleep: the sampler sleeps already")

    def slept(self, *, keep_weights: bool) -> None:
        """All parts sleep now."""
        self.asleep = frozenset(PARTS)
        self._weights_lost = not keep_weights

    def check_wake(self, parts: Sequence[Part]) -> None:
        """Refuse what cannot be woken, or would let requests run without weights.

        Raises:
            ValueError: if no part is given, or one is not asleep.
            SamplerAsleepError: if requests would go on before the weights were loaded again.
        """
        if not parts or not set(parts) <= self.asleep:
            raise ValueError(
                f"wake: expected some of the parts that sleep, {sorted(self.asleep)}, got "
                f"{list(parts)}"
            )
        if self._weights_lost and set(parts) == self.asleep:
            raise SamplerAsleepError(
                'wake: the weights were given up by sleep(keep_weights=False); wake ("weights",), '
                'load weights, then wake ("kv_cache",)'
            )

    def woke(self, parts: Sequence[Part]) -> None:
        """These parts are awake."""
        self.asleep -= set(parts)

    def check_load(self) -> None:
        """Refuse new weights while there is no memory for them.

        Raises:
            SamplerAsleepError: if the weights sleep.
        """
        if "weights" in self.asleep:
            raise SamplerAsleepError('load: the weights sleep; wake ("weights",) first')

    def loaded(self) -> None:
        """Weights are there."""
        self._weights_lost = False

    def check_sample(self) -> None:
        """Refuse requests that nobody would answer.

        Raises:
            SamplerAsleepError: if anything sleeps.
        """
        if self.asleep:
            raise SamplerAsleepError(
                f"sample: {', '.join(sorted(self.asleep))} of the sampler sleep; wake them first"
            )
