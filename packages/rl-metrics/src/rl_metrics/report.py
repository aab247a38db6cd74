"""The run as one HTML page: no script, nothing loaded from elsewhere, light and dark.

Everything that a model, a config or an environment wrote is escaped by Jinja2; control and
direction characters are made visible first. The page's own policy forbids scripts as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl_metrics.answers import Answer, answer_of
from rl_metrics.charts import draw_charts
from rl_metrics.completions import CompletionPair, read_completions
from rl_metrics.environments import read_environments, shown_value
from rl_metrics.headlines import column, headlines_of
from rl_metrics.jsonl import StepRecord, read_metrics
from rl_metrics.names import METRICS, Metric
from rl_metrics.page import write_page
from rl_metrics.panels import PANELS, filled_panels
from rl_metrics.svg_axes import number
from rl_metrics.visible import visible


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What the page shows."""

    title: str
    records: Sequence[StepRecord]

    subtitle: str = ""
    """One line under the title: algorithm, model, engine, sampler, devices."""

    completions: Sequence[CompletionPair] = ()

    config_toml: str = ""
    """The effective configuration as it stands in the run folder."""

    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Worker to variable to value. A value is not shown if its name says that it is secret."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    prompt: str
    ground_truth: str
    answers: tuple[Answer, Answer]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    metric: Metric
    first: str
    last: str
    lowest: str
    highest: str


def read_run(folder: Path, *, title: str, subtitle: str = "") -> RunReport:
    """Collect a report from a run folder.

    Reads ``metrics.jsonl``, and where they exist ``effective_config.toml``, ``completions.json``
    (see `write_completions`) and ``environments.json`` (worker to variable to value).

    Raises:
        FileNotFoundError: without ``metrics.jsonl``.
        ValueError: for a broken file; names it.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        message = f"{folder} is no run folder: expected a file metrics.jsonl in it"
        raise FileNotFoundError(message)
    config = folder / "effective_config.toml"
    completions = folder / "completions.json"
    environments = folder / "environments.json"
    return RunReport(
        title=title,
        subtitle=subtitle,
        records=read_metrics(metrics),
        completions=read_completions(completions) if completions.exists() else (),
        config_toml=config.read_text(encoding="utf-8") if config.exists() else "",
        environments=read_environments(environments) if environments.exists() else {},
    )


def write_report(report: RunReport, path: Path) -> None:
    """Write the page atomically. Sections without content are left out.

    Raises:
        ValueError: if there is no record to report on.
    """
    if not report.records:
        message = f"write_report: expected at least one step to report on, got none, for {path}"
        raise ValueError(message)
    panels = filled_panels(report.records)
    shown = [panel for panel, _ in panels]
    write_page(
        "report.html",
        path,
        report=report,
        headlines=headlines_of(report.records),
        charts=draw_charts(panels),
        empty_panels=[panel.title for panel in PANELS if panel not in shown],
        completions=[_pair(pair) for pair in report.completions],
        rows=_rows(report.records),
        environments=[
            (
                worker,
                [(name, shown_value(name, value)) for name, value in sorted(variables.items())],
            )
            for worker, variables in report.environments.items()
        ],
    )


def _pair(pair: CompletionPair) -> _Pair:
    return _Pair(
        prompt=visible(pair.prompt),
        ground_truth=visible(pair.ground_truth),
        answers=(
            answer_of(pair.before, pair.reward_before),
            answer_of(pair.after, pair.reward_after),
        ),
    )


def _rows(records: Sequence[StepRecord]) -> list[_Row]:
    rows = []
    for name, metric in METRICS.items():
        values = column(records, name)
        if values:
            rows.append(
                _Row(
                    metric=metric,
                    first=number(values[0]),
                    last=number(values[-1]),
                    lowest=number(min(values)),
                    highest=number(max(values)),
                )
            )
    return rows
