"""The staleness histogram: which bins there are, and which bin a staleness falls into.

Metric names come from one list, so the bins are fixed: single steps up to 4, where the usual
bounds are, and doubling ranges above.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessBin:
    """Stalenesses that are counted together."""

    name: str
    """The quantity in ``staleness/<name>/trajectories``."""

    label: str
    """The range as people read it."""

    first: int
    last: float


STALENESS_BINS = (
    *(StalenessBin(name=f"at_{n}", label=str(n), first=n, last=n) for n in range(5)),
    StalenessBin(name="at_5_to_8", label="5-8", first=5, last=8),
    StalenessBin(name="at_9_to_16", label="9-16", first=9, last=16),
    StalenessBin(name="at_17_up", label="17+", first=17, last=math.inf),
)
"""In rising order, without gaps."""


def staleness_histogram(stalenesses: Iterable[int]) -> Mapping[str, float]:
    """Count trajectories by staleness, under the names that `METRICS` has for it.

    Args:
        stalenesses: of each trajectory trained on, in optimizer steps.

    Returns:
        All bins, in rising order; the counts add up to the number of trajectories.

    Raises:
        ValueError: for a negative staleness: trained before it was sampled.
    """
    counts = {f"staleness/{bin_.name}/trajectories": 0.0 for bin_ in STALENESS_BINS}
    for staleness in stalenesses:
        if staleness < 0:
            message = f"staleness_histogram: expected stalenesses from 0 on, got {staleness}"
            raise ValueError(message)
        name = next(bin_.name for bin_ in STALENESS_BINS if staleness <= bin_.last)
        counts[f"staleness/{name}/trajectories"] += 1.0
    return counts
