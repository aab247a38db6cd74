"""The run in one picture, as PNG. Needs the extra ``rl-metrics[plot]``.

Draws on a figure of its own: neither pyplot nor a global matplotlib setting is touched, so it can
be called from a thread and beside a notebook's own plots.
"""

from collections.abc import Sequence
from pathlib import Path

from rl_metrics.atomic import write_atomically
from rl_metrics.jsonl import StepRecord
from rl_metrics.panels import filled_panels


def plot_run(records: Sequence[StepRecord], path: Path, *, title: str = "") -> None:
    """Draw every panel for which the records hold something, and write the PNG atomically.

    The reward takes the whole upper row; the rest follow in rows of three.

    Raises:
        ImportError: without matplotlib; names the extra.
        ValueError: if no record holds a metric that is drawn.
    """
    try:
        from rl_metrics.figure import draw_png  # noqa: PLC0415 - matplotlib is an extra
    except ImportError as error:
        message = "plot_run needs matplotlib; install the extra rl-metrics[plot]"
        raise ImportError(message) from error

    panels = filled_panels(records)
    if not panels:
        message = (
            f"plot_run: none of the {len(records)} records holds a metric that is drawn, such as "
            "reward/train/mean; write metrics before plotting them"
        )
        raise ValueError(message)
    write_atomically(path, draw_png(panels, title=title))
