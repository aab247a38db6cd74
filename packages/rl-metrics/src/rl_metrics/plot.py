"""The run in one picture, as PNG. Needs the extra ``rl-metrics[plot]``.

Draws on a figure of its own: neither pyplot nor a global matplotlib setting is touched, so it can
be called from a thread and beside a notebook's own plots.
"""

from collections.abc import Sequence
from pathlib import Path

from rl_metrics.atomic import write_atomically
from rl_metrics.comparison import comparison_panels
from rl_metrics.jsonl import StepRecord
from rl_metrics.panels import Panel, Series, filled_panels
from rl_metrics.report import RunReport


def plot_run(records: Sequence[StepRecord], path: Path, *, title: str = "") -> None:
    """Draw every panel for which the records hold something, and write the PNG atomically.

    The reward takes the whole upper row; the rest follow in rows of three.

    Raises:
        ImportError: without matplotlib; names the extra.
        ValueError: if no record holds a metric that is drawn.
    """
    panels = filled_panels(records)
    if not panels:
        message = (
            f"plot_run: none of the {len(records)} records holds a metric that is drawn, such as "
            "reward/train/mean; write metrics before plotting them"
        )
        raise ValueError(message)
    _draw(panels, path, title=title)


def plot_comparison(first: RunReport, second: RunReport, path: Path) -> None:
    """Draw every metric that either run holds, overlaid, and write the PNG atomically.

    Raises:
        ImportError: without matplotlib; names the extra.
        ValueError: if neither run holds a metric that is drawn.
    """
    panels = comparison_panels(first, second)
    if not panels:
        message = (
            f"plot_comparison: neither {first.title} nor {second.title} holds a metric that is "
            "drawn, such as reward/train/mean"
        )
        raise ValueError(message)
    _draw(panels, path, title=f"{first.title} and {second.title}")


def _draw(panels: Sequence[tuple[Panel, Sequence[Series]]], path: Path, *, title: str) -> None:
    try:
        from rl_metrics.figure import draw_png  # noqa: PLC0415 - matplotlib is an extra
    except ImportError as error:
        message = "a plot needs matplotlib; install the extra rl-metrics[plot]"
        raise ImportError(message) from error
    write_atomically(path, draw_png(panels, title=title))
