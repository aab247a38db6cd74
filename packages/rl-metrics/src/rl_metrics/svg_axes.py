"""What charts as SVG text have in common: axes, ticks, labels and the opening tag."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 10.0, 24.0
"""Margins in user units: tick labels stand left and below, half a dot right and above."""

_MIN_SPAN = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Maps values onto a stretch of the picture."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value stands, in user units."""
        if self.is_log:
            value = math.log10(value)
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def opening(title: str, *, width: float, height: float) -> str:
    """The tag that begins a chart of this size."""
    head = f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img"'
    return f'{head} aria-label="{escape(title)}">'


def frame(across: Axis, up: Axis, *, width: float, height: float) -> list[str]:
    """Grid lines and tick labels."""
    parts = []
    for tick in up.ticks:
        y = up(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT:g}" x2="{width - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(_label(tick), LEFT - 6, y + 3.5, anchor="end"))
    parts += [
        _text(_label(tick), across(tick), height - 7, anchor="middle") for tick in across.ticks
    ]
    return parts


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


def linear_axis(
    values: Sequence[float], *, start: float, end: float, num_ticks: int, whole: bool = False
) -> Axis:
    """Ticks at round values; the ends are ticks too, unless the values are whole (steps)."""
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
    return Axis(low=low, high=high, start=start, end=end, ticks=ticks)


def log_axis(values: Sequence[float], *, start: float, end: float) -> Axis:
    """A tick per power of ten, or fewer."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    every = math.ceil((high - low) / 5)
    ticks = tuple(10.0**power for power in range(low, high + 1, every))
    return Axis(low=low, high=high, start=start, end=end, ticks=ticks, is_log=True)


def _nice(gap: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(gap))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= gap * (1 - 1e-9))


def _label(tick: float) -> str:
    return escape(f"{tick:,.10g}" if abs(tick) >= 1e-3 or tick == 0 else f"{tick:.0e}")  # noqa: PLR2004
