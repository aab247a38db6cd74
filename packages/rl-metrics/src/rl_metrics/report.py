"""The run as one HTML page: no script, nothing loaded from elsewhere, light and dark.

Everything that a model, a config or an environment wrote is escaped by Jinja2; control and
direction characters are made visible first. The page's own policy forbids scripts as well.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rl_metrics.atomic import write_atomically
from rl_metrics.completions import CompletionPair, read_completions
from rl_metrics.jsonl import StepRecord, read_metrics
from rl_metrics.names import METRICS, Metric
from rl_metrics.panels import Panel, Series, filled_panels
from rl_metrics.svg import line_chart, number
from rl_metrics.visible import visible

_SECRET_WORDS = frozenset(
    {
        "apikey",
        "auth",
        "cookie",
        "credential",
        "credentials",
        "jwt",
        "key",
        "passwd",
        "password",
        "pwd",
        "secret",
        "token",
    }
)


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
class _Headline:
    label: str
    value: str
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chart:
    panel: Panel
    series: Sequence[Series]
    svg: Markup


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    text: str
    label: str
    mark: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    prompt: str
    ground_truth: str
    answers: tuple[_Answer, _Answer]


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
        environments=_read_environments(environments) if environments.exists() else {},
    )


def write_report(report: RunReport, path: Path) -> None:
    """Write the page atomically. Sections without content are left out.

    Raises:
        ValueError: if there is no record to report on.
    """
    if not report.records:
        message = f"write_report: expected at least one step to report on, got none, for {path}"
        raise ValueError(message)
    templates = Environment(
        loader=PackageLoader("rl_metrics"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = templates.get_template("report.html").render(
        report=report,
        headlines=_headlines(report.records),
        charts=_charts(report.records),
        completions=[_pair(pair) for pair in report.completions],
        rows=_rows(report.records),
        environments=[
            (worker, [(name, _shown(name, value)) for name, value in sorted(variables.items())])
            for worker, variables in report.environments.items()
        ],
        version=version("rl-metrics"),
    )
    # a lone surrogate, which a tokenizer can produce, is not UTF-8
    write_atomically(path, page.encode("utf-8", errors="replace"))


def _read_environments(path: Path) -> dict[str, dict[str, str]]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        message = f"{path}: expected a JSON object of workers: {error}"
        raise ValueError(message) from error
    if not isinstance(content, dict) or not all(
        isinstance(variables, dict) and all(isinstance(value, str) for value in variables.values())
        for variables in content.values()
    ):
        message = f"{path}: expected a JSON object of worker to variable to string"
        raise ValueError(message)
    return content


def _shown(name: str, value: str) -> str:
    if _SECRET_WORDS & set(name.lower().split("_")):
        return "(set, not shown)" if value else "(empty)"
    return visible(value)


def _column(records: Iterable[StepRecord], name: str) -> list[float]:
    return [record.values[name] for record in records if name in record.values]


def _headlines(records: Sequence[StepRecord]) -> list[_Headline]:
    headlines = []
    for name, label, decimals, note in (
        ("reward/heldout/mean", "Held-out reward", 2, "first to last"),
        ("reward/train/mean", "Sampled reward", 2, "first to last"),
        ("length/completion/mean", "Completion length", 1, "tokens, first to last"),
    ):
        values = _column(records, name)
        if values:
            value = f"{values[0]:.{decimals}f} \u2192 {values[-1]:.{decimals}f}"
            headlines.append(_Headline(label=label, value=value, note=note))
    elapsed = _column(records, "time/elapsed/seconds")
    step_seconds = _column(records, "time/step/seconds")
    headlines.append(
        _Headline(
            label="Steps",
            value=number(records[-1].step),
            note=f"{sum(step_seconds) / len(step_seconds):.1f} s each" if step_seconds else "",
        )
    )
    if elapsed:
        headlines.append(_Headline(label="Wall time", value=_duration(elapsed[-1]), note=""))
    mismatch = _column(records, "mismatch/logprob/max")
    if mismatch:
        headlines.append(
            _Headline(
                label="Sampler mismatch",
                value=f"{max(mismatch):.2g}",
                note="nats, largest",
            )
        )
    return headlines


def _charts(records: Sequence[StepRecord]) -> list[_Chart]:
    charts = []
    for index, (panel, series) in enumerate(filled_panels(records)):
        width, height = (1060.0, 250.0) if index == 0 else (360.0, 190.0)
        svg = Markup(line_chart(panel, series, width=width, height=height))  # noqa: S704 - escapes
        charts.append(_Chart(panel=panel, series=series, svg=svg))
    return charts


def _pair(pair: CompletionPair) -> _Pair:
    return _Pair(
        prompt=visible(pair.prompt),
        ground_truth=visible(pair.ground_truth),
        answers=(_answer(pair.before, pair.reward_before), _answer(pair.after, pair.reward_after)),
    )


def _answer(text: str, reward: float | None) -> _Answer:
    if reward is None:
        return _Answer(text=visible(text), label="not scored", mark="open")
    mark = "good" if reward > 0 else "bad"
    return _Answer(text=visible(text), label=f"reward {reward:g}", mark=mark)


def _rows(records: Sequence[StepRecord]) -> list[_Row]:
    rows = []
    for name, metric in METRICS.items():
        values = _column(records, name)
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


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minute} min"
    return f"{minute} min {second} s" if minute else f"{second} s"
