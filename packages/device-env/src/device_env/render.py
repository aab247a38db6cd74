"""Plain text for terminals: aligned, wrapped, coloured only where that is wanted."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import final

import attrs

from device_env.doctor import Report
from device_env.findings import LEVELS, Finding, Level
from device_env.host import SHARED_MEMORY

_COLOURS: dict[Level, str] = {"error": "31;1", "warning": "33;1", "note": "36"}
_GIB = 1 << 30
_COLUMN = 16


@final
@attrs.frozen(kw_only=True)
class Style:
    """How text is laid out."""

    width: int = attrs.field(default=96, validator=attrs.validators.ge(40))
    """Columns."""

    colour: bool = False
    """Whether escape codes are written."""

    def paint(self, text: str, code: str) -> str:
        """The text in a colour, where colours are on."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text


def render_report(report: Report, style: Style) -> str:
    """The doctor's report."""
    host = report.host
    quota = "" if host.core_quota is None else f", {host.core_quota:g} granted by the control group"
    shared = (
        "none"
        if host.shared_memory_bytes is None or host.shared_memory_free_bytes is None
        else f"{_gib(host.shared_memory_bytes)}, {_gib(host.shared_memory_free_bytes)} free"
    )
    sections = [
        _section("Device", _device_rows(report), style),
        _section(
            "Packages",
            [
                ("python", report.python),
                *report.versions.items(),
                ("module vllm", " and ".join(report.vllm_providers) or "not installed"),
            ],
            style,
        ),
        _section("Host", [("cores", f"{host.cores}{quota}"), (str(SHARED_MEMORY), shared)], style),
        _section("Environment", _environment_rows(report), style),
        _heading("Findings", style) + "\n" + render_findings(report.findings, style),
    ]
    return "\n\n".join([*sections, _verdict(report, style)])


def render_findings(
    findings: Sequence[Finding], style: Style, *, places: Iterable[str] = ()
) -> str:
    """Findings one below the other; `places` stand before the names, one per finding."""
    if not findings:
        return "  none"
    where = list(places) or [""] * len(findings)
    blocks: list[str] = []
    for finding, place in zip(findings, where, strict=True):
        level = style.paint(f"{finding.level:<7}", _COLOURS[finding.level])
        head = f"  {level}  {place}{style.paint(finding.variable, '1')}"
        blocks.append(
            "\n".join(
                [
                    head,
                    *_wrap(finding.message, style, first=" " * 11),
                    *_wrap(finding.fix, style, first=" " * 11 + "-> ", rest=" " * 14),
                ]
            )
        )
    return "\n".join(blocks)


def count_by_level(findings: Sequence[Finding]) -> str:
    """`1 error, 2 warnings`."""
    counts = [(level, sum(found.level == level for found in findings)) for level in LEVELS]
    parts = [f"{count} {level}{'s' if count != 1 else ''}" for level, count in counts if count]
    return ", ".join(parts) or "nothing found"


def _device_rows(report: Report) -> list[tuple[str, str]]:
    device = report.device
    if device is None:
        return [("none", "the visible-device variables contradict each other, see below")]
    rows: list[tuple[str, str]] = [
        (device.kind, f"{device.count} x {device.names[0]}, {_gib(device.memory_bytes[0])}")
    ]
    if len(set(device.names)) > 1:
        rows = [
            (f"{device.kind} {index}", f"{name}, {_gib(size)}")
            for index, (name, size) in enumerate(
                zip(device.names, device.memory_bytes, strict=True)
            )
        ]
    rows.append(("collectives", device.collective_backend))
    rows += [
        (label, version)
        for label, version in (
            ("driver", device.driver_version),
            ("toolkit", device.toolkit_version),
        )
        if version is not None
    ]
    if device.visible_devices_variable is not None:
        rows.append(("chosen by", device.visible_devices_variable))
    rows += [(f"not {rejected.kind}", rejected.reason) for rejected in device.rejected]
    rows += [("note", note) for note in device.notes]
    return rows


def _environment_rows(report: Report) -> list[tuple[str, str]]:
    if not report.environment:
        return [("", "no variable that matters is set")]
    return [("", f"{name}={value}") for name, value in report.environment.items()]


def _verdict(report: Report, style: Style) -> str:
    counts = count_by_level(report.findings)
    if not report.healthy:
        text = f"{counts}: this machine is not ready. Follow the arrows, errors first."
        return style.paint(_fill(text, style), _COLOURS["error"])
    warned = any(finding.level == "warning" for finding in report.findings)
    text = f"{counts}: {'no errors, but read the warnings' if warned else 'this machine is ready'}."
    return style.paint(_fill(text, style), "32;1")


def _fill(text: str, style: Style) -> str:
    return "\n".join(_wrap(text, style, first=""))


def _heading(title: str, style: Style) -> str:
    return style.paint(title, "1")


def _section(title: str, rows: Iterable[tuple[str, str]], style: Style) -> str:
    lines = [_heading(title, style)]
    for label, text in rows:
        if label:
            rest = " " * (_COLUMN + 2)
            lines += _wrap(text, style, first=f"  {label:<{_COLUMN}}", rest=rest)
        else:
            lines += _wrap(text, style, first="  ", rest="    ")
    return "\n".join(lines)


def _wrap(text: str, style: Style, *, first: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        style.width,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
