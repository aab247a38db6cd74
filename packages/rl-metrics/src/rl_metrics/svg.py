"""Line charts as SVG text, to stand inside an HTML page.

Colours come from CSS classes of the page, so the same chart suits light and dark. Every label is
escaped here; the result is safe to insert as it is.
"""

import math
from collections.abc import Sequence
from html import escape

from rl_metrics.panels import Panel, Series
from rl_metrics.svg_axes import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Axis,
    frame,
    linear_axis,
    log_axis,
    number,
    opening,
)

_DOTS_UP_TO = 60
"""Series up to this many points get a dot, with its value as a tooltip, per point."""

_MAX_POINTS = 1500
"""Points drawn of one series; a longer one is thinned evenly, its last point kept."""


def line_chart(panel: Panel, series: Sequence[Series], *, width: float, height: float) -> str:
    """One panel as an ``<svg>`` element; values that are not finite leave a gap."""
    is_log = panel.scale == "log" and any(
        _drawn(v, is_log=True) for line in series for v in line.values
    )
    lines = [_thinned(line) for line in series]
    right, bottom = width - RIGHT, height - BOTTOM
    across = linear_axis(
        [float(step) for line in lines for step in line.steps],
        start=LEFT,
        end=right,
        num_ticks=max(3, int(width // 90)),
        whole=True,
    )
    values = [v for line in lines for v in line.values if _drawn(v, is_log=is_log)]
    if is_log:
        up = log_axis(values, start=bottom, end=TOP)
    else:
        origin = [0.0] if panel.from_zero or not values else []
        up = linear_axis([*values, *origin], start=bottom, end=TOP, num_ticks=5)
    parts = [opening(panel.title, width=width, height=height)]
    parts += frame(across, up, width=width, height=height)
    parts += [_line(line, index, across, up) for index, line in enumerate(lines)]
    parts.append("</svg>")
    return "".join(parts)


def _thinned(line: Series) -> Series:
    count = len(line.steps)
    if count <= _MAX_POINTS:
        return line
    kept = [round(index * (count - 1) / (_MAX_POINTS - 1)) for index in range(_MAX_POINTS)]
    return Series(
        label=line.label,
        steps=tuple(line.steps[index] for index in kept),
        values=tuple(line.values[index] for index in kept),
    )


def _drawn(value: float, *, is_log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not is_log)


def _line(line: Series, index: int, across: Axis, up: Axis) -> str:
    runs: list[list[tuple[float, float]]] = [[]]
    dots = []
    for step, value in zip(line.steps, line.values, strict=True):
        if not _drawn(value, is_log=up.is_log):
            runs.append([])
            continue
        x, y = across(step), up(value)
        runs[-1].append((x, y))
        tooltip = escape(f"{line.label}, step {step}: {number(value)}")
        dots.append(
            f'<circle class="dot s{index}" cx="{x:.1f}" cy="{y:.1f}" r="2.6">'
            f"<title>{tooltip}</title></circle>"
        )
    paths = [
        f'<polyline class="line s{index}" points="'
        + " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
        + '"/>'
        for run in runs
        if len(run) > 1
    ]
    # a point between two gaps has no line, so it needs its dot
    return "".join(paths + (dots if len(dots) <= _DOTS_UP_TO or not paths else []))
