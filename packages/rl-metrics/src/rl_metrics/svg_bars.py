"""Stacked bars as SVG text: how the parts of a whole change over the steps."""

from collections.abc import Sequence
from html import escape

from rl_metrics.panels import Panel, Series
from rl_metrics.stacked import Bar, stacked_bars
from rl_metrics.svg_axes import BOTTOM, LEFT, RIGHT, TOP, Axis, frame, linear_axis, opening

_GAP_FROM = 6.0
"""Width in user units from which bars stand apart."""


def stacked_chart(panel: Panel, series: Sequence[Series], *, width: float, height: float) -> str:
    """One panel as an ``<svg>`` element; each bar is 1 high, divided as its counts are."""
    bars = stacked_bars(series)
    steps = [step for line in series for step in line.steps]
    right, bottom = width - RIGHT, height - BOTTOM
    across = linear_axis(
        [min(steps) - 0.5, max(steps) + 0.5],
        start=LEFT,
        end=right,
        num_ticks=max(3, int(width // 90)),
        whole=True,
    )
    up = linear_axis([0.0, 1.0], start=bottom, end=TOP, num_ticks=5)
    parts = [opening(panel.title, width=width, height=height)]
    parts += frame(across, up, width=width, height=height)
    for bar in bars:
        parts += _bar(bar, [line.label for line in series], across, up)
    parts.append("</svg>")
    return "".join(parts)


def _bar(bar: Bar, labels: Sequence[str], across: Axis, up: Axis) -> list[str]:
    left, right = across(bar.first_step - 0.5), across(bar.last_step + 0.5)
    # narrow bars overlap a little, or the page shines through the seams between them
    gap = 1.0 if right - left >= _GAP_FROM else -0.3
    where = f"step {bar.first_step}"
    if bar.last_step > bar.first_step:
        where = f"steps {bar.first_step} to {bar.last_step}"
    parts = []
    below = 0.0
    for index, (share, label) in enumerate(zip(bar.shares, labels, strict=True)):
        if share > 0.0:
            y, base = up(below + share), up(below)
            tooltip = escape(f"{where}: {share:.0%} at {label}")
            parts.append(
                f'<rect class="bar b{index}" x="{left + gap / 2:.1f}" y="{y:.1f}" '
                f'width="{right - left - gap:.1f}" height="{base - y:.1f}">'
                f"<title>{tooltip}</title></rect>"
            )
        below += share
    return parts
