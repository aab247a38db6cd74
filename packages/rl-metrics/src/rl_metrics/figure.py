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

COLOURS = ("#2563a8", "#d9822b", "#4c9a62", "#8a63a8")
"""Line colours in order: blue, orange, green, violet; told apart by the colour-blind too."""

_INK = "#30363d"
_FAINT = "#d8dee4"
_COLUMNS = 3
_DOTS_PER_INCH = 130
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
        _draw(figure.add_subplot(cell), panel, series)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
    return buffer.getvalue()


def _draw(axes: Axes, panel: Panel, series: Sequence[Series]) -> None:
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
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=_INK)
    axes.set_ylabel(panel.unit, fontsize=8.5, color=_INK)
    axes.set_xlabel("step", fontsize=8.5, color=_INK)
    if panel.scale == "log" and any(
        value > 0 and math.isfinite(value) for line in series for value in line.values
    ):
        axes.set_yscale("log", nonpositive="mask")
    elif panel.from_zero:
        axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=_INK, length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    if len(series) > 1:
        # beside the title, where no line can run through it
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            borderaxespad=0.0,
            markerscale=0.0,
            fontsize=7.5,
            frameon=False,
            labelcolor=_INK,
            ncols=len(series),
            handlelength=0.8,
            columnspacing=0.8,
            handletextpad=0.3,
        )
