"""The lines as a table for the terminal, and as JSON."""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import attrs
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from verl_conversion.conversion import Conversion, Line, count_labels
from verl_conversion.environment import EnvironmentLine
from verl_conversion.labels import Label
from verl_conversion.sheet import Setting

_COLOURS: Mapping[Label, str] = {
    "carried": "green",
    "default": "green",
    "renamed": "cyan",
    "inert": "yellow",
    "overwritten": "yellow",
    "duplicate": "yellow",
    "stale": "yellow",
    "trap": "bold red",
    "no counterpart": "magenta",
    "broken": "bold red",
    "unresolved": "bold red",
    "unknown": "bold red",
}
_WITHOUT_EFFECT = frozenset({"inert", "overwritten", "stale", "duplicate"})
_PIPED_WIDTH = 150
_ROOM = 110
_FIRST, _LABELS = 48, 14


@final
@attrs.frozen(kw_only=True)
class Report:
    """Everything that there is to say about a launch."""

    source: str
    """The input, in words."""

    conversion: Conversion
    """Lines and settings."""

    environment: Sequence[EnvironmentLine]
    """Lines about variables."""

    notes: Sequence[str]
    """About the input as a whole; each is something to look at."""

    problems: Sequence[str]
    """Why the recipe's own checks would not take the settings."""

    @property
    def undecided(self) -> int:
        """How much somebody has to look at."""
        variables = sum(line.decide for line in self.environment)
        return self.conversion.undecided + variables + len(self.notes) + len(self.problems)


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the report: tables where there is room for them, paragraphs elsewhere."""
    console = console or Console()
    if console.is_terminal:
        console.print(*_parts(report, wide=console.width >= _ROOM), sep="\n")
        return
    width = console.width if "COLUMNS" in os.environ else max(console.width, _PIPED_WIDTH)
    page = Console(width=width, file=io.StringIO())
    with page.capture() as captured:
        page.print(*_parts(report, wide=width >= _ROOM), sep="\n")
    for line in captured.get().splitlines():  # without the blanks that fill a column
        console.file.write(line.rstrip() + "\n")


def report_json(report: Report) -> dict[str, object]:
    """The report as plain values."""
    conversion = report.conversion
    return {
        "source": report.source,
        "verl": conversion.composed.release,
        "program": conversion.composed.defaults.program,
        "model_engine": conversion.composed.engine,
        "undecided": report.undecided,
        "overrides": [_plain(line) for line in conversion.lines],
        "defaults": [_plain(line) for line in conversion.unset],
        "environment": [
            {
                "variable": line.variable,
                "labels": list(line.labels),
                "why": line.why,
                "decide": line.decide,
            }
            for line in report.environment
        ],
        "notes": list(report.notes),
        "problems": list(report.problems),
        "settings": {path: setting.value for path, setting in conversion.settings.items()},
    }


def _plain(line: Line) -> dict[str, object]:
    return {
        "override": line.override,
        "labels": list(line.labels),
        "to": {setting.path: setting.value for setting in line.to},
        "why": list(line.why),
        "evidence": list(line.evidence),
        "decide": line.decide,
    }


def _parts(report: Report, *, wide: bool) -> Iterator[RenderableType]:
    conversion = report.conversion
    c = conversion.composed
    yield (
        f"[bold]{escape(report.source)}[/]: {c.defaults.program} of verl {c.release} with "
        f"model_engine={c.engine}, {len(conversion.lines)} overrides"
    )
    for note in report.notes:
        yield f"[bold red]note[/] {escape(note)}"
    for title, lines in _sections(conversion):
        if lines:
            rows = [_Row(_short(line.override), line.labels, _here(line)) for line in lines]
            yield from _section_of(f"{title} ({len(lines)})", "override", rows, wide=wide)
    if report.environment:
        rows = [_Row(line.variable, line.labels, [escape(line.why)]) for line in report.environment]
        yield from _section_of("Environment variables", "variable", rows, wide=wide)
    yield _summary(report)


def _sections(conversion: Conversion) -> list[tuple[str, list[Line]]]:
    """Lines, each in the first section that it belongs to."""
    names = {
        "decide": "To look at",
        "carried": "Carried over",
        "without": "Without effect in verl",
        "default": "Equal to verl's default",
        "other": "No counterpart, and none is needed",
        "unset": "Not set in the launch: verl's defaults that matter",
    }
    found: dict[str, list[Line]] = {name: [] for name in names}
    for line in conversion.lines:
        found[_section(line)].append(line)
    for line in conversion.unset:
        found["decide" if line.decide else "unset"].append(line)
    return [(title, found[name]) for name, title in names.items()]


def _section(line: Line) -> str:
    if line.decide:
        return "decide"
    if "carried" in line.labels:
        return "carried"
    if _WITHOUT_EFFECT & set(line.labels):
        return "without"
    return "default" if "default" in line.labels else "other"


@final
@attrs.frozen
class _Row:
    """One line of a section."""

    first: str
    labels: Sequence[Label]
    here: Sequence[str]
    """Paragraphs, in rich's markup."""


def _section_of(
    title: str, first: str, rows: Sequence[_Row], *, wide: bool
) -> Iterator[RenderableType]:
    """A table of three columns, or one paragraph for each row."""
    yield f"\n[bold]{title}[/]"
    if wide:
        table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
        table.add_column(first, overflow="fold", width=_FIRST)
        table.add_column("label", width=_LABELS)
        table.add_column("here, and why", ratio=1, overflow="fold")
        for row in rows:
            table.add_row(escape(row.first), "\n".join(_labels(row.labels)), "\n".join(row.here))
        yield table
        return
    for row in rows:
        yield f"{escape(row.first)}  {', '.join(_labels(row.labels))}"
        yield Padding("\n".join(row.here), (0, 0, 0, 4))


def _short(override: str) -> str:
    """Without the part that most overrides begin with."""
    sign = override[: len(override) - len(override.lstrip("+~"))]
    return sign + override[len(sign) :].removeprefix("actor_rollout_ref.")


def _labels(labels: Sequence[Label]) -> list[str]:
    return [f"[{_COLOURS[label]}]{label}[/]" for label in labels]


def _here(line: Line) -> list[str]:
    parts = [
        f"[green]{escape(setting.path)} = {escape(_value(setting))}[/]"
        + (f"  ({escape(setting.note)})" if setting.note else "")
        for setting in line.to
    ]
    parts += [escape(why) for why in line.why]
    return [*parts, *(f"[dim]{escape(evidence)}[/]" for evidence in line.evidence)]


def _value(setting: Setting) -> str:
    value = setting.value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _summary(report: Report) -> str:
    counts = count_labels(report.conversion.lines)
    shown = ", ".join(f"{number} {label}" for label, number in counts.items())
    lines = [f"\n{len(report.conversion.lines)} overrides: {shown}"]
    lines += [f"[bold red]refused by the recipe[/] {escape(why)}" for why in report.problems]
    verdict = (
        f"[bold red]{report.undecided} to look at[/]"
        if report.undecided
        else "[bold green]all carried over[/]"
    )
    return "\n".join([*lines, verdict])
