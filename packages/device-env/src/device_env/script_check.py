"""Does every variable that a launch script sets take effect as it is written?"""

from collections.abc import Mapping
from typing import final

import attrs

from device_env.check import Judge
from device_env.findings import LEVELS, Finding
from device_env.shell_script import Launch, follow_script

_BYTE_ORDER_MARK = "\ufeff"


@final
@attrs.frozen(kw_only=True)
class LocatedFinding:
    """A finding with the line of the script that it is about."""

    line: int
    """Line, from 1."""

    finding: Finding
    """What is wrong there."""


def check_script(
    text: str, judge: Judge, *, environ: Mapping[str, str] | None = None
) -> list[LocatedFinding]:
    """Judge a shell script line by line, without running it.

    Every line that sets a variable is judged, whichever way the script may go; what variables
    do to each other is judged in the environments that processes of the script see together.
    A value that only running the script could tell is not judged, its name is.

    Args:
        text: the script.
        judge: versions, device and configuration of the run.
        environ: what the caller of the script has in its environment, as far as it decides
            which way the script goes; by default nothing.

    Returns:
        Findings by line, each once.

    Raises:
        ScriptError: the script cannot be read; the line is named.
    """
    followed = follow_script(text.removeprefix(_BYTE_ORDER_MARK), environ)
    found: dict[LocatedFinding, None] = dict.fromkeys(_of_the_file(text))
    for setting in followed.settings:
        for finding in judge.variable(setting.name, setting.value.text):
            found[LocatedFinding(line=setting.line, finding=finding)] = None
    for launch in followed.launches:
        found.update(dict.fromkeys(_together(launch, judge)))
    for setting in followed.unexported:
        if setting.name in judge.registry and setting.name not in (environ or {}):
            finding = Finding(
                level="warning",
                variable=setting.name,
                message="assigned but not exported: no process sees it",
                fix=f"write export {setting.name}=...",
            )
            found[LocatedFinding(line=setting.line, finding=finding)] = None
    notes = [(line, f"{what}, whose variables are not seen") for line, what in followed.unseen]
    if not followed.every_way:
        notes.append((1, "not every way through the script was followed"))
    for line, message in notes:
        fix = "check that file too, or give what it decides with --with NAME=VALUE"
        finding = Finding(level="note", variable="script", message=message, fix=fix)
        found[LocatedFinding(line=line, finding=finding)] = None
    return sorted(found, key=lambda at: (at.line, LEVELS.index(at.finding.level)))


def _of_the_file(text: str) -> list[LocatedFinding]:
    """What an editor left in the file that a shell takes for text (run with bash 5.2)."""
    seen: list[tuple[int, str, str]] = []
    if text.startswith(_BYTE_ORDER_MARK):
        message = "begins with a byte order mark, with which bash does not find the first command"
        seen.append((1, message, "save it as UTF-8 without a byte order mark"))
    end = text.find("\r\n")
    if end >= 0:
        message = "lines end in CR LF, and bash keeps the CR in every value and keyword"
        seen.append((text.count("\n", 0, end) + 1, message, "save it with line ends of LF"))
    return [
        LocatedFinding(
            line=line,
            finding=Finding(level="error", variable="script", message=message, fix=fix),
        )
        for line, message, fix in seen
    ]


def _together(launch: Launch, judge: Judge) -> list[LocatedFinding]:
    """What the variables of one environment do to each other."""
    known = {name: value.text for name, value in launch.environ.items() if value.text is not None}
    unknown = launch.environ.keys() - known.keys()
    return [
        LocatedFinding(line=_line(launch, finding.variable), finding=finding)
        for finding in judge.together(known)
        if finding.variable not in unknown
    ]


def _line(launch: Launch, variable: str) -> int:
    held = launch.environ.get(variable)
    return launch.line if held is None or held.line is None else held.line
