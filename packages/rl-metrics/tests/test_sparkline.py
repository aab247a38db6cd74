"""Sparklines."""

import math

from rl_metrics.sparkline import sparkline


def test_lowest_and_highest_are_the_ends() -> None:
    """The scale is the series' own."""
    assert sparkline([0, 7], width=10) == "\u2581\u2588"
    assert sparkline(list(range(8)), width=8) == "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def test_a_longer_series_is_averaged() -> None:
    """Four values on two characters: the means 1 and 5."""
    assert sparkline([0, 2, 4, 6], width=2) == sparkline([1, 5], width=2)
    assert len(sparkline([float(i % 7) for i in range(1000)], width=14)) == 14


def test_flat_empty_and_unusual_series() -> None:
    """A flat series is a line in the middle, a NaN a gap, nothing is nothing."""
    assert sparkline([2, 2, 2], width=5) == "\u2584\u2584\u2584"
    assert sparkline([0, math.nan, 1], width=5) == "\u2581 \u2588"
    assert sparkline([math.inf], width=5) == " "
    assert sparkline([], width=5) == ""
