"""Line charts as SVG text, to stand inside an HTML page.

Colours come from CSS classes of the page, so the same chart suits light and dark. Every label is
escaped here; the result is safe to insert as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rl_metrics.panels import Panel, Series

_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 10.0, 10.0, 24.0
"""Margins in user units: tick labels stand left and below, half a dot right and above."""

_DOTS_UP_TO = 60
"""Series up to this many points get a dot, with its value as a tooltip, per point."""

_MAX_POINTS = 1500
"""Points drawn of one series; a longer one is thinned evenly, its last point kept."""

_MIN_SPAN = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axis:
    """Maps values onto a stretch of the picture."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def __call__(self, value: float) -> float:
        if self.is_log:
            value = math.log10(value)
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_chart(panel: Panel, series: Sequence[Series], *, width: float, height: float) -> str:
    """One panel as an ``<svg>`` element; values that are not finite leave a gap."""
    is_log = panel.scale == "log" and any(
        _drawn(v, is_log=True) for line in series for v in line.values
    )
    lines = [_thinned(line) for line in series]
    right, bottom = width - _RIGHT, height - _BOTTOM
    across = _linear_axis(
        [float(step) for line in lines for step in line.steps],
        start=_LEFT,
        end=right,
        num_ticks=max(3, int(width // 90)),
        whole=True,
    )
    values = [v for line in lines for v in line.values if _drawn(v, is_log=is_log)]
    if is_log:
        up = _log_axis(values, start=bottom, end=_TOP)
    else:
        origin = [0.0] if panel.from_zero or not values else []
        up = _linear_axis([*values, *origin], start=bottom, end=_TOP, num_ticks=5)
    head = f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img"'
    parts = [f'{head} aria-label="{escape(panel.title)}">']
    for tick in up.ticks:
        y = up(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(_label(tick), _LEFT - 6, y + 3.5, anchor="end"))
    parts += [
        _text(_label(tick), across(tick), height - 7, anchor="middle") for tick in across.ticks
    ]
    parts += [_line(line, index, across, up) for index, line in enumerate(lines)]
    parts.append("</svg>")
    return "".join(parts)


def _text(label: str, x: float, y: float, *, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{label}</text>'


def number(value: float) -> str:
    """A value as people read it: four significant digits, thousands separated."""
    if not math.isfinite(value):
        return str(float(value))
    if value == int(value) and abs(value) < 1e15:  # noqa: PLR2004 - doubles are exact up to here
        return f"{int(value):,}"
    if abs(value) >= 1000:  # noqa: PLR2004 - four digits before the point
        return f"{value:,.0f}"
    return f"{value:.4g}"


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


def _line(line: Series, index: int, across: _Axis, up: _Axis) -> str:
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


def _linear_axis(
    values: Sequence[float], *, start: float, end: float, num_ticks: int, whole: bool = False
) -> _Axis:
    low, high = min(values), max(values)
    if high - low < _MIN_SPAN * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    gap = _nice((high - low) / num_ticks)
    if whole:
        gap = max(1.0, gap)
    else:
        low, high = math.floor(low / gap + 1e-9) * gap, math.ceil(high / gap - 1e-9) * gap
    first, last = math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9)
    ticks = tuple(round(index * gap, 12) for index in range(first, last + 1))
    return _Axis(low=low, high=high, start=start, end=end, ticks=ticks)


def _log_axis(values: Sequence[float], *, start: float, end: float) -> _Axis:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    every = math.ceil((high - low) / 5)
    ticks = tuple(10.0**power for power in range(low, high + 1, every))
    return _Axis(low=low, high=high, start=start, end=end, ticks=ticks, is_log=True)


def _nice(gap: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(gap))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= gap * (1 - 1e-9))


def _label(tick: float) -> str:
    return escape(f"{tick:,.10g}" if abs(tick) >= 1e-3 or tick == 0 else f"{tick:.0e}")  # noqa: PLR2004
