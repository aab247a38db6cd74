"""Two runs on one page: what was set differently first, then every metric overlaid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_metrics.answers import Answer, answer_of
from rl_metrics.charts import draw_charts
from rl_metrics.effective import flat_settings
from rl_metrics.environments import shown_value
from rl_metrics.headlines import Headline, column, headlines_of
from rl_metrics.jsonl import StepRecord
from rl_metrics.names import METRICS, Metric
from rl_metrics.page import write_page
from rl_metrics.panels import PANELS, Line, Panel, Series, panel_series
from rl_metrics.report import RunReport
from rl_metrics.svg_axes import number
from rl_metrics.visible import visible

_ABSENT = "(not set)"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Difference:
    name: str
    first: str
    second: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    metric: Metric
    first_last: str
    second_last: str
    first_mean: str
    second_mean: str
    ratio: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answers:
    prompt: str
    ground_truth: str
    first: Answer | None
    second: Answer | None


def write_comparison(first: RunReport, second: RunReport, path: Path) -> None:
    """Write a page with both runs atomically; `second` is measured against `first`.

    Raises:
        ValueError: if a run has no record, both have one title, or a configuration is no TOML.
    """
    _check(first, second)
    write_page(
        "comparison.html",
        path,
        first=first,
        second=second,
        headlines=_headlines(first, second),
        has_settings=bool(first.config_toml or second.config_toml),
        settings=_differences(_settings(first), _settings(second)),
        environments=_differences(_variables(first), _variables(second)),
        charts=draw_charts(comparison_panels(first, second)),
        answers=_answers(first, second),
        rows=_rows(first.records, second.records),
    )


def comparison_panels(first: RunReport, second: RunReport) -> list[tuple[Panel, list[Series]]]:
    """One panel per metric that either run holds, with one line per run.

    The lines are those of `first` and `second`, in this order, even where one of them is empty, so
    that each run keeps its colour. What is stacked gets a panel for each run.
    """
    panels: list[tuple[Panel, list[Series]]] = []
    drawn: set[str] = set()  # a metric may stand in two panels of one run
    for panel in PANELS:
        if panel.stacked:
            for run in (first, second):
                series = panel_series(panel, run.records)
                if series:
                    panels.append((_alone(panel, panel.lines, run.title), series))
            continue
        for line in panel.lines:
            if line.metric in drawn:
                continue
            drawn.add(line.metric)
            pair = [_line_of(line, panel, run) for run in (first, second)]
            if any(series.steps for series in pair):
                label = line.label if len(panel.lines) > 1 else ""
                panels.append((_alone(panel, (line,), label), pair))
    return panels


def _check(first: RunReport, second: RunReport) -> None:
    for run in (first, second):
        if not run.records:
            message = f"write_comparison: expected at least one step of {run.title!r}, got none"
            raise ValueError(message)
    if first.title == second.title:
        message = (
            f"write_comparison: expected titles that tell the runs apart, got twice {first.title!r}"
        )
        raise ValueError(message)


def _alone(panel: Panel, lines: tuple[Line, ...], label: str) -> Panel:
    return Panel(
        title=f"{panel.title}: {label}" if label else panel.title,
        unit=panel.unit,
        lines=lines,
        scale=panel.scale,
        from_zero=panel.from_zero,
        stacked=panel.stacked,
    )


def _line_of(line: Line, panel: Panel, run: RunReport) -> Series:
    only = _alone(panel, (line,), "")
    for series in panel_series(only, run.records):
        return Series(label=run.title, steps=series.steps, values=series.values)
    return Series(label=f"{run.title} (not recorded)", steps=(), values=())


def _headlines(
    first: RunReport, second: RunReport
) -> list[tuple[Headline | None, Headline | None]]:
    of_first = {headline.label: headline for headline in headlines_of(first.records)}
    of_second = {headline.label: headline for headline in headlines_of(second.records)}
    labels = list(dict.fromkeys([*of_first, *of_second]))
    return [(of_first.get(label), of_second.get(label)) for label in labels]


def _settings(run: RunReport) -> dict[str, str]:
    where = f"effective_config.toml of {run.title}"
    return {k: visible(str(v)) for k, v in flat_settings(run.config_toml, where=where).items()}


def _variables(run: RunReport) -> dict[str, str]:
    return {
        f"{worker}: {name}": shown_value(name, value)
        for worker, variables in run.environments.items()
        for name, value in variables.items()
    }


def _differences(first: Mapping[str, str], second: Mapping[str, str]) -> list[_Difference]:
    return [
        _Difference(name=name, first=first.get(name, _ABSENT), second=second.get(name, _ABSENT))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]


def _answers(first: RunReport, second: RunReport) -> list[_Answers]:
    of_first = {pair.prompt: pair for pair in first.completions}
    of_second = {pair.prompt: pair for pair in second.completions}
    rows = []
    for prompt in dict.fromkeys([*of_first, *of_second]):
        pairs = (of_first.get(prompt), of_second.get(prompt))
        answers = [
            None if pair is None else answer_of(pair.after, pair.reward_after) for pair in pairs
        ]
        truths = [pair.ground_truth for pair in pairs if pair is not None]
        rows.append(
            _Answers(
                prompt=visible(prompt),
                ground_truth=visible(truths[0]),
                first=answers[0],
                second=answers[1],
            )
        )
    return rows


def _rows(first: Sequence[StepRecord], second: Sequence[StepRecord]) -> list[_Row]:
    rows = []
    for name, metric in METRICS.items():
        columns = [column(records, name) for records in (first, second)]
        if not any(columns):
            continue
        means = [sum(values) / len(values) if values else None for values in columns]
        lasts = [number(values[-1]) if values else "" for values in columns]
        shown = ["" if mean is None else number(mean) for mean in means]
        ratio = means[1] / means[0] if means[0] and means[1] is not None else None
        rows.append(
            _Row(
                metric=metric,
                first_last=lasts[0],
                second_last=lasts[1],
                first_mean=shown[0],
                second_mean=shown[1],
                ratio="" if ratio is None else f"{ratio:.3g}",
            )
        )
    return rows
