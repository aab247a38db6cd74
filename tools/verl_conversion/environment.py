"""Environment variables of a launch, judged by device-env."""

from collections.abc import Mapping
from pathlib import Path
from typing import final

import attrs

from device_env import Finding, Judge, Level, RunFacts, ScriptError, check_script
from device_env.device import DeviceKind
from verl_conversion.composed import Composed
from verl_conversion.labels import Label
from verl_conversion.launches import Launch, LaunchError
from verl_conversion.releases import VLLM
from verl_conversion.situations import R

_UNREAD = "does not read it"


@final
@attrs.frozen(kw_only=True)
class EnvironmentLine:
    """What becomes of one environment variable."""

    variable: str
    """With its value, where that is known."""

    labels: tuple[Label, ...]
    """As for overrides; ``carried`` for what nothing is known against."""

    why: str
    """What device-env says, and what to do."""

    decide: bool = False
    """Whether what is set is not what runs."""


def judge_environment(
    launch: Launch,
    composed: Composed,
    *,
    script: Path | None = None,
    versions: Mapping[str, str] | None = None,
) -> list[EnvironmentLine]:
    """A line for every variable that the launch sets, and for what device-env finds elsewhere.

    Args:
        launch: what is launched.
        composed: its configuration, on which the meaning of some variables depends.
        script: where it stands, if it is a script: lines that set variables are judged with it.
        versions: what stands beside verl, by distribution; a vllm that is not named is that which
            the release of verl is for.

    Raises:
        LaunchError: a name or a version is none.
    """
    judge = _judge(composed, versions or {})
    found = judge.environment({k: v for k, v in launch.environ.items() if v is not None})
    if script is not None:
        try:
            located = check_script(script.read_text(encoding="utf-8"), judge)
        except ScriptError:  # read before
            located = []
        names = {finding.variable for finding in found}
        found += [at.finding for at in located if at.finding.variable not in names]
    grave = {finding.variable for finding in found if finding.level != "note"}
    found = [at for at in found if at.level != "note" or at.variable not in grave]
    lines = [_line(finding, launch) for finding in dict.fromkeys(found)]
    judged = {finding.variable for finding in found}
    kept = [
        EnvironmentLine(
            variable=_with_value(name, launch),
            labels=("carried",),
            why="keep it: set it where the run is started"
            if name in judge.registry
            else "not in device-env's table: nobody there is known to read it; set it where the "
            "run is started if your own code does",
        )
        for name in launch.environ
        if name not in judged
    ]
    return [*lines, *kept]


def _judge(c: Composed, versions: Mapping[str, str]) -> Judge:
    kind: DeviceKind | None = "npu" if c.on_npu else None
    eager = c.get(f"{R}enforce_eager")
    try:
        return Judge(
            versions={"vllm": VLLM[c.release], "verl": c.release, **versions},
            device_kind=kind,
            facts=RunFacts(
                training_engine="fsdp" if c.engine == "dp" else "veomni",
                enforce_eager=eager if isinstance(eager, bool) else None,
                online_weight_update=True,
            ),
        )
    except ValueError as error:
        raise LaunchError(f"--has: {error}") from error


def _line(finding: Finding, launch: Launch) -> EnvironmentLine:
    return EnvironmentLine(
        variable=_with_value(finding.variable, launch),
        labels=_labels(finding.level, finding),
        why=f"{finding.message} (give it with --has)"
        if finding.message.startswith("not judged")
        else f"{finding.message}; {finding.fix}",
        decide=finding.level == "error",
    )


def _labels(level: Level, finding: Finding) -> tuple[Label, ...]:
    if finding.variable == "VLLM_VERSION" and level == "error":
        return ("stale", "trap")
    if _UNREAD in finding.message:
        return ("inert", "stale")
    by_level: dict[Level, tuple[Label, ...]] = {
        "error": ("trap",),
        "warning": ("inert",),
        "note": ("carried",),
    }
    return by_level[level]


def _with_value(name: str, launch: Launch) -> str:
    value = launch.environ.get(name)
    return name if value is None else f"{name}={value}"
