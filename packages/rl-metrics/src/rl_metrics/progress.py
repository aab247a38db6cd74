"""What a run shows while it runs.

On a terminal every finished step is one line that stays, above a display that moves::

      step   reward                 held out   length  ended   s/step   tokens/s
      3/16   0.312  ██████              0.250     13.9    55%      6.1        412
      4/16   0.391  ████████                      12.4    61%      5.9        430
    ╭──────────────────────────────────────────────────────────────────────────────╮
    │ ━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━━   4/16   0:25 · 1:12 left   │
    │ reward    0.094 ▁▁▄▇█ 0.391    held out  0.100 ▁█ 0.250           sampling    │
    ╰──────────────────────────────────────────────────────────────────────────────╯

In a notebook the same stands in one output of the cell, with the latest rows, and is replaced at
every step. Anywhere else (a log file, CI) every step is one plain line and nothing moves.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Self, final

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl_metrics.names import check_names
from rl_metrics.notebook import NotebookOutput
from rl_metrics.sparkline import sparkline
from rl_metrics.visible import visible

_TRAIN = "reward/train/mean"
_HELDOUT = "reward/heldout/mean"
_LENGTH = "length/completion/mean"
_STOPPED = "length/stopped/fraction"
_SECONDS = "time/step/seconds"
_SAMPLED = "throughput/sampled/tokens_per_second"

_MAX_WIDTH = 92
"""Columns that the display takes of a wider terminal."""

_ALL_COLUMNS_WIDTH = 64
"""Columns from which on every number of a row has its place."""

_BAR_WIDTH = 14
_SPARK_WIDTH = 14
_NOTEBOOK_ROWS = 12
"""Latest steps that a notebook shows."""

_STEPS_PER_ESTIMATE = 8
"""Recent steps that the remaining time is estimated from."""


@final
class ProgressDisplay:
    """Shows the steps of a run.

    A context manager: leaving it, Ctrl-C included, restores the terminal. The numbers come from
    the mapping that also goes to `MetricsWriter.write`; what is not in it is left out of the line.
    """

    def __init__(
        self, *, num_steps: int, done_steps: int = 0, console: Console | None = None
    ) -> None:
        """Start at `done_steps` of `num_steps`.

        Args:
            num_steps: optimizer steps of the whole run, at least 1.
            done_steps: steps that an earlier part of the run has done.
            console: where to print; None is standard output.

        Raises:
            ValueError: for step numbers that do not fit together.
        """
        if num_steps < 1 or not 0 <= done_steps <= num_steps:
            message = (
                "ProgressDisplay: expected num_steps >= 1 and 0 <= done_steps <= num_steps, "
                f"got num_steps {num_steps} and done_steps {done_steps}"
            )
            raise ValueError(message)
        self._num_steps = num_steps
        self._done_steps = done_steps
        self._console = console or Console()
        self._moves = self._console.is_terminal and not self._console.is_dumb_terminal
        self._started = time.monotonic()
        self._step_seconds: list[float] = []
        self._last_step_at = self._started
        self._history: dict[str, list[float]] = {_TRAIN: [], _HELDOUT: []}
        self._stage = ""
        self._header_shown = False
        self._notebook: NotebookOutput | None = None
        self._latest: Mapping[str, float] = {}
        self._rows: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=_NOTEBOOK_ROWS)
        self._live = Live(
            console=self._console,
            get_renderable=self._footer,
            refresh_per_second=4,
            transient=True,
            auto_refresh=True,
        )

    def __enter__(self) -> Self:
        self._started = self._last_step_at = time.monotonic()
        if self._moves:
            self._live.start()
        elif self._console.is_jupyter:
            self._notebook = NotebookOutput.open(width=self._width())
        return self

    def __exit__(self, *_: object) -> None:
        if self._moves:
            self._live.stop()
        self._stage = ""
        self._refresh_notebook()

    def stage(self, text: str) -> None:
        """Say what is going on now, such as "sampling"; a log file is not told."""
        self._stage = visible(text).replace("\n", " ")
        self._refresh_notebook()

    def say(self, text: str) -> None:
        """Print a line above the display; its characters are shown as they are."""
        self._console.print(Text(visible(text)), soft_wrap=not self._moves)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show that `step`, counted from 1, is done.

        Step 0 is for what is measured before training, such as the held-out reward.

        Raises:
            ValueError: for an unknown metric name, or a step outside the run.
        """
        check_names(values)
        if not 0 <= step <= self._num_steps:
            message = f"ProgressDisplay: expected a step from 0 to {self._num_steps}, got {step}"
            raise ValueError(message)
        now = time.monotonic()
        if step > self._done_steps:
            self._step_seconds.append((now - self._last_step_at) / (step - self._done_steps))
            self._done_steps = step
        self._last_step_at = now
        self._latest = dict(values)
        for name, history in self._history.items():
            if name in values:
                history.append(values[name])
        if self._moves:
            self._console.print(self._row(step, values, header=not self._header_shown))
            self._header_shown = True
        elif self._notebook is not None:
            self._rows.append((step, dict(values)))
            self._refresh_notebook()
        else:
            # soft_wrap: a log line stays one line, however narrow the pretended terminal is
            self._console.print(Text(self._plain_line(step, values)), soft_wrap=True)

    def _remaining_seconds(self) -> float | None:
        recent = self._step_seconds[-_STEPS_PER_ESTIMATE:]
        if not recent:
            return None
        expected = sum(recent) / len(recent) * (self._num_steps - self._done_steps)
        return max(0.0, expected - (time.monotonic() - self._last_step_at))

    def _plain_line(self, step: int, values: Mapping[str, float]) -> str:
        parts = [f"step {step}/{self._num_steps}"]
        formats = (
            (_TRAIN, "reward {}", _three),
            (_HELDOUT, "held out {}", _three),
            (_LENGTH, "length {}", _one),
            (_STOPPED, "ended {}", _percent),
            (_SECONDS, "{} s/step", _one),
            (_SAMPLED, "{} tokens/s", _whole),
        )
        parts += [text.format(show(values[name])) for name, text, show in formats if name in values]
        parts += [f"{label} {show(values[name])}" for name, label, show in _FLOW if name in values]
        parts.append(f"elapsed {_clock(time.monotonic() - self._started)}")
        remaining = self._remaining_seconds()
        if remaining is not None and self._done_steps < self._num_steps:
            parts.append(f"left {_clock(remaining)}")
        return "  ".join(parts)

    def _width(self) -> int:
        # two columns stay free: at the edge, the terminal's own "^C" would push the display down
        return min(self._console.width - 2, _MAX_WIDTH)

    def _refresh_notebook(self) -> None:
        if self._notebook is not None:
            rows = [
                self._row(step, values, header=index == 0)
                for index, (step, values) in enumerate(self._rows)
            ]
            self._notebook.show(Group(*rows, self._footer()))

    def _row(self, step: int, values: Mapping[str, float], *, header: bool) -> Table:
        row = Table(
            box=None,
            width=self._width(),
            padding=(0, 1, 0, 1),
            show_header=header,
            header_style="bold dim",
            expand=True,
        )
        digits = len(str(self._num_steps))
        columns: list[tuple[str, int, Text]] = [
            ("step", max(4, 2 * digits + 1), Text(f"{step}/{self._num_steps}", style="bold")),
            ("reward", 0, _reward_bar(values.get(_TRAIN))),
            ("held out", 8, Text(_show(values, _HELDOUT, _three), style="bold green")),
            ("length", 7, Text(_show(values, _LENGTH, _one))),
            ("ended", 5, Text(_show(values, _STOPPED, _percent))),
            ("s/step", 6, Text(_show(values, _SECONDS, _one))),
            ("tokens/s", 8, Text(_show(values, _SAMPLED, _whole))),
        ]
        if self._width() < _ALL_COLUMNS_WIDTH:
            # the reward must be legible; these two are in the metrics file too
            columns = [column for column in columns if column[0] not in {"ended", "s/step"}]
        for name, width, _ in columns:
            if width:
                row.add_column(name, justify="right", width=width, no_wrap=True)
            else:
                row.add_column(name, ratio=1, no_wrap=True, overflow="crop")
        row.add_row(*(cell for _, _, cell in columns))
        return row

    def _footer(self) -> Panel:
        width = self._width()
        elapsed = _clock(time.monotonic() - self._started)
        remaining = self._remaining_seconds()
        left = "" if remaining is None else f" · {_clock(remaining)} left"
        bar = Table.grid(padding=(0, 2, 0, 0), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_row(
            ProgressBar(
                total=self._num_steps,
                completed=self._done_steps,
                complete_style="cyan",
                finished_style="green",
            ),
            Text.assemble(
                (f"{self._done_steps}/{self._num_steps}", "bold"), (f"  {elapsed}{left}", "dim")
            ),
        )
        trend = Table.grid(padding=(0, 3, 0, 0), expand=True)
        trend.add_column(no_wrap=True, overflow="crop")
        trend.add_column(no_wrap=True, overflow="crop")
        trend.add_column(justify="right", ratio=1, no_wrap=True, overflow="ellipsis")
        trend.add_row(
            _trend("reward", self._history[_TRAIN], "yellow", width),
            _trend("held out", self._history[_HELDOUT], "green", width),
            Text(self._stage, style="italic dim"),
        )
        flow = Text("  ").join(
            Text.assemble((f"{label} ", "dim"), show(self._latest[name]))
            for name, label, show in _FLOW
            if name in self._latest
        )
        flow.no_wrap, flow.overflow = True, "ellipsis"
        parts = (bar, trend, flow) if flow else (bar, trend)
        return Panel(Group(*parts), box=box.ROUNDED, border_style="dim", width=width)


def _trend(label: str, history: list[float], style: str, display_width: int) -> Text:
    if not history:
        return Text(f"{label} -", style="dim")
    # labels, numbers and frame of both trends take 50 columns, and what is going on takes 12
    spark_width = min(max((display_width - 62) // 2, 3), _SPARK_WIDTH)
    first = f"{_three(history[0])} " if display_width >= _ALL_COLUMNS_WIDTH else ""
    return Text.assemble(
        (f"{label} ", "dim"),
        first,
        (sparkline(history, width=spark_width), style),
        " ",
        (_three(history[-1]), "bold"),
    )


def _reward_bar(reward: float | None) -> Text:
    """The number, and a bar for what part of a reward of 1 it is."""
    if reward is None:
        return Text("")
    text = Text(f"{_three(reward):>7}  ", style="bold")
    if math.isfinite(reward):
        share = min(max(reward, 0.0), 1.0)
        filled = round(share * _BAR_WIDTH)
        text.append("█" * filled, style="yellow")
        text.append("·" * (_BAR_WIDTH - filled), style="dim")
    return text


def _show(values: Mapping[str, float], name: str, show: Callable[[float], str]) -> str:
    return show(values[name]) if name in values else ""


def _three(value: float) -> str:
    return f"{value:.3f}"


def _one(value: float) -> str:
    return f"{value:.1f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _tenth_percent(value: float) -> str:
    return f"{value:.1%}"


_FLOW: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("idle/trainer/fraction", "trainer idle", _percent),
    ("idle/sampler/fraction", "samplers idle", _percent),
    ("queue/ready/value", "waiting", _whole),
    ("staleness/trajectory/max", "stale", _whole),
    ("lost/groups/fraction", "lost", _tenth_percent),
    ("queue/in_flight/value", "in flight", _whole),
)
"""How well the parts of an asynchronous run keep each other busy: metric, label, format."""
