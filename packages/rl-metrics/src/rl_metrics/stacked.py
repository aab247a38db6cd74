"""Counts that are parts of a whole, as shares per bar."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rl_metrics.panels import Series

MAX_BARS = 240
"""Bars drawn at most; the counts of neighbouring steps are added up beyond that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One or more neighbouring steps."""

    first_step: int
    last_step: int

    shares: tuple[float, ...]
    """One per series; they add up to 1."""


def stacked_bars(series: Sequence[Series]) -> list[Bar]:
    """The bars of counts; a step without counts, or with one that is not finite, has none."""
    counts: dict[int, list[float]] = {}
    for index, line in enumerate(series):
        for step, value in zip(line.steps, line.values, strict=True):
            counts.setdefault(step, [0.0] * len(series))[index] = value
    steps = sorted(step for step, values in counts.items() if 0 < sum(values) < math.inf)
    num_bars = min(MAX_BARS, len(steps))
    edges = [index * len(steps) // num_bars for index in range(num_bars + 1)] if num_bars else [0]
    bars = []
    for start, end in pairwise(edges):
        columns = zip(*(counts[step] for step in steps[start:end]), strict=True)
        totals = [sum(column) for column in columns]
        shares = tuple(total / sum(totals) for total in totals)
        bars.append(Bar(first_step=steps[start], last_step=steps[end - 1], shares=shares))
    return bars
