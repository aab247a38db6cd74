"""A series of numbers as one line of block characters."""

import math
from collections.abc import Sequence
from itertools import pairwise

_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], *, width: int) -> str:
    """The series from its lowest (▁) to its highest value (█), at most `width` characters.

    A longer series is averaged in equal stretches. A flat series sits in the middle; values that
    are not finite are left blank.
    """
    means = [_mean(stretch) for stretch in _stretches(values, width)]
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return " " * len(means)
    low, high = min(finite), max(finite)
    return "".join(_level(value, low, high) for value in means)


def _stretches(values: Sequence[float], width: int) -> list[Sequence[float]]:
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)] if count else [0]
    return [values[start:end] for start, end in pairwise(edges)]


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _level(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return " "
    if high == low:
        return _LEVELS[len(_LEVELS) // 2 - 1]
    return _LEVELS[round((value - low) / (high - low) * (len(_LEVELS) - 1))]
