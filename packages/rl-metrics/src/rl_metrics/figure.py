"""Draws panels on a matplotlib figure.

Imported by `rl_metrics.plot` only when it is asked to draw.
"""

import io
import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rl_metrics.panels import Panel, Series
from rl_metrics.stacked import stacked_bars

COLOURS = ("#2563a8", "#d9822b", "#4c9a62", "#8a63a8")
"""Line colours in order: blue, orange, green, violet; told apart by the colour-blind too."""

SHARE_COLOURS = (
    "#a9c9ea",
    "#6f9fd0",
    "#2563a8",
    "#f0c27b",
    "#e08a2e",
    "#c25a1c",
    "#9c2f2a",
    "#5f1834",
)
"""Of the parts of a stacked panel, from what is usual to what is far off."""

_INK = "#30363d"
_FAINT = "#d8dee4"
_COLUMNS = 3
_DOTS_PER_INCH = 130
_KEYS_POINTS = 17.0
"""Height of the line of keys between a panel and its title."""

_FEW_POINTS = 30
"""Series this short are drawn with a dot per point."""


def draw_png(panels: Sequence[tuple[Panel, Sequence[Series]]], *, title: str) -> bytes:
    """The panels as the bytes of a PNG: the first across the whole width, the rest in rows."""
    num_rows = 1 + math.ceil((len(panels) - 1) / _COLUMNS)
    figure = Figure(figsize=(11.0, 3.3 + 2.5 * (num_rows - 1)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.set_facecolor("white")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK)
    grid = figure.add_gridspec(num_rows, _COLUMNS, height_ratios=[1.35] + [1.0] * (num_rows - 1))
    for index, (panel, series) in enumerate(panels):
        cell = (
            grid[0, :] if index == 0 else grid[1 + (index - 1) // _COLUMNS, (index - 1) % _COLUMNS]
        )
        axes = figure.add_subplot(cell)
        if panel.stacked:
            _draw_bars(axes, series)
        else:
            _draw_lines(axes, panel, series)
        _dress(axes, panel, num_keys=len(series))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
    return buffer.getvalue()


def _draw_bars(axes: Axes, series: Sequence[Series]) -> None:
    bars = stacked_bars(series)
    centres = [(bar.first_step + bar.last_step) / 2 for bar in bars]
    width = 0.9 if len(bars) <= _FEW_POINTS else 1.0  # no seams between narrow bars
    widths = [width * (bar.last_step - bar.first_step + 1) for bar in bars]
    below = [0.0] * len(bars)
    for index, (colour, line) in enumerate(zip(SHARE_COLOURS, series, strict=False)):
        heights = [bar.shares[index] for bar in bars]
        axes.bar(centres, heights, widths, bottom=below, color=colour, label=line.label)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_ylim(0.0, 1.0)


def _draw_lines(axes: Axes, panel: Panel, series: Sequence[Series]) -> None:
    for colour, line in zip(COLOURS, series, strict=False):
        axes.plot(
            line.steps,
            line.values,
            color=colour,
            label=line.label,
            linewidth=1.8,
            marker="o" if len(line.steps) <= _FEW_POINTS else None,
            markersize=3.2,
            solid_joinstyle="round",
        )
    if panel.scale == "log" and any(
        value > 0 and math.isfinite(value) for line in series for value in line.values
    ):
        axes.set_yscale("log", nonpositive="mask")
    elif panel.from_zero:
        axes.set_ylim(bottom=0.0)


def _dress(axes: Axes, panel: Panel, *, num_keys: int) -> None:
    axes.set_title(
        panel.title,
        loc="left",
        pad=_KEYS_POINTS if num_keys > 1 else None,
        fontsize=10,
        fontweight="bold",
        color=_INK,
    )
    axes.set_ylabel(panel.unit, fontsize=8.5, color=_INK)
    axes.set_xlabel("step", fontsize=8.5, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", labelsize=8, colors=_INK, length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    if num_keys > 1:
        # under the title, where no line can run through it
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.0),
            borderaxespad=0.0,
            markerscale=0.0,
            fontsize=7.5,
            frameon=False,
            labelcolor=_INK,
            ncols=num_keys,
            handlelength=0.8,
            columnspacing=0.8,
            handletextpad=0.3,
        )
