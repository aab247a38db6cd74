"""Stacked bars."""

import math
import re

from rl_metrics.panels import Panel, Series
from rl_metrics.stacked import MAX_BARS, stacked_bars
from rl_metrics.svg_bars import stacked_chart

PANEL = Panel(title="Shares", unit="", lines=(), stacked=True)


def series(**counts: tuple[float, ...]) -> list[Series]:
    return [
        Series(label=label, steps=tuple(range(1, len(values) + 1)), values=values)
        for label, values in counts.items()
    ]


def test_shares_by_hand() -> None:
    """Each step is a whole; one without any count has no bar."""
    bars = stacked_bars(series(a=(3.0, 0.0, 1.0), b=(1.0, 0.0, 1.0)))
    assert [(bar.first_step, bar.last_step, bar.shares) for bar in bars] == [
        (1, 1, (0.75, 0.25)),
        (3, 3, (0.5, 0.5)),
    ]
    assert stacked_bars(series(a=(0.0, math.nan, math.inf))) == []


def test_neighbouring_steps_are_added_up() -> None:
    """A run of twice as many steps has bars of two steps, and no step is left out."""
    count = 2 * MAX_BARS
    bars = stacked_bars(series(a=(1.0,) * count, b=(3.0,) * count))
    assert [bar.first_step for bar in bars] == list(range(1, count, 2))
    assert [bar.last_step for bar in bars] == list(range(2, count + 1, 2))
    assert {bar.shares for bar in bars} == {(0.25, 0.75)}


def test_heights_are_the_shares() -> None:
    """Of 100 units between the axes, three quarters and one quarter; labels are escaped."""
    svg = stacked_chart(PANEL, series(**{"<a>": (3.0,), "b": (1.0,)}), width=200, height=134)
    heights = [float(height) for height in re.findall(r'<rect[^>]* height="([\d.]+)"', svg)]
    assert heights == [75.0, 25.0]
    assert "step 1: 75% at &lt;a&gt;" in svg


def test_nothing_to_stack_is_an_empty_frame() -> None:
    """Counts of zero only: a chart without bars, and no error."""
    assert "<rect" not in stacked_chart(PANEL, series(a=(0.0,)), width=200, height=134)
