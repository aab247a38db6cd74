"""The command line: doctor, check, explain, export. No vendor is imported but by doctor."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
from packaging.version import InvalidVersion, Version

from device_env.check import Judge
from device_env.device import DEVICE_KINDS
from device_env.doctor import examine
from device_env.env_file import parse_env_file
from device_env.errors import EnvFileError, ScriptError, UnknownVariableError
from device_env.explanation import explain
from device_env.findings import Finding
from device_env.profile import is_name, shell_lines
from device_env.recipes import RECIPE_NAMES, RECIPES, Recipe, profile_for
from device_env.render import Style, count_by_level, render_findings, render_report
from device_env.rules import RunFacts, check_seconds
from device_env.script_check import check_script

_USAGE_ERROR = 2
_VERSIONED = ("vllm", "vllm-ascend", "torch-npu", "torch", "ray")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 is fine, 1 means errors were found, 2 means it was called wrongly."""
    arguments = _parser().parse_args(argv)
    match arguments.command:
        case "doctor":
            return _doctor(as_json=arguments.json)
        case "check":
            return _check(arguments)
        case "explain":
            return _explain(arguments.names)
        case "export":
            return _export(arguments)
        case other:
            raise AssertionError(other)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="device-env",
        description="Which accelerator is there, and which environment variables take effect.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="look at this machine and say what to do next")
    doctor.add_argument("--json", action="store_true", help="for programs")
    check = commands.add_parser(
        "check",
        help="judge an environment for given versions, without importing anything",
        description="Judge an environment. Variables of a component whose version is not given "
        "are named, not judged.",
    )
    where = check.add_mutually_exclusive_group()
    where.add_argument(
        "script", nargs="?", type=Path, metavar="SCRIPT", help="a shell script, judged line by line"
    )
    where.add_argument(
        "--env-file", type=Path, metavar="FILE", help="NAME=value lines; default: this environment"
    )
    check.add_argument(
        "--with",
        dest="with_",
        action="append",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="what the caller of SCRIPT has in its environment; decides which way it goes",
    )
    _add_versions(check)
    check.add_argument("--device", choices=DEVICE_KINDS, help="the device of the run")
    _add_facts(check)
    check.add_argument("--strict", action="store_true", help="warnings count as errors")
    check.add_argument("--json", action="store_true", help="for programs")
    export = commands.add_parser(
        "export",
        help="the environment of a device and recipe as shell lines, each with its reason",
        description="Print lines for a shell script. What contradicts the versions or the "
        "configuration goes to standard error, and an error prints no lines.",
    )
    export.add_argument("--device", choices=DEVICE_KINDS, required=True)
    export.add_argument("--recipe", choices=RECIPE_NAMES, required=True)
    export.add_argument(
        "--num-threads", type=int, default=1, metavar="N", help="OpenMP, per worker"
    )
    export.add_argument(
        "--set",
        dest="with_",
        action="append",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="your own value, in place of any other",
    )
    _add_versions(export)
    _add_facts(export)
    explained = commands.add_parser("explain", help="all that is known about a variable")
    explained.add_argument("names", nargs="+", metavar="NAME")
    return parser


def _add_versions(parser: argparse.ArgumentParser) -> None:
    for option in _VERSIONED:
        parser.add_argument(
            f"--{option}", type=_version, metavar="VERSION", help=f"the {option} of the run"
        )


def _add_facts(check: argparse.ArgumentParser) -> None:
    """Options for what the run's configuration says; None where it is not told."""
    facts = check.add_argument_group("configuration of the run, for rules that depend on it")
    facts.add_argument("--training-engine", choices=("fsdp", "veomni", "megatron"))
    for name, text in (
        ("enforce-eager", "vLLM runs without captured graphs"),
        ("sleep-mode", "the sampler gives its memory back between rollouts"),
        ("online-weight-update", "new weights are loaded into a running sampler"),
    ):
        facts.add_argument(
            f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=text
        )
    facts.add_argument(
        "--process-group-timeout", type=_seconds, metavar="SECONDS", help="of torch.distributed"
    )


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not is_name(name):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def _version(text: str) -> str:
    try:
        Version(text)
    except InvalidVersion as error:
        message = f"expected a version such as 0.32.0, got {text!r}"
        raise argparse.ArgumentTypeError(message) from error
    return text


def _seconds(text: str) -> float:
    try:
        return check_seconds(float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _doctor(*, as_json: bool) -> int:
    report = examine(os.environ)
    if as_json:
        _print(json.dumps(attrs.asdict(report) | {"healthy": report.healthy}, indent=2))
    else:
        _print(render_report(report, _style()))
    return 0 if report.healthy else 1


def _check(arguments: argparse.Namespace) -> int:
    file: Path | None = arguments.script or arguments.env_file
    if arguments.with_ and arguments.script is None:
        return _complain("--with says which way a SCRIPT goes, and none is given")
    judge = _judge(arguments)
    try:
        if arguments.script is not None:
            located, judged = _script_findings(arguments.script, judge, dict(arguments.with_))
        else:
            located, judged = _environment_findings(arguments.env_file, judge)
    except (OSError, EnvFileError, ScriptError) as error:
        return _complain(f"{file}: {error}")
    findings = [finding for _, finding in located]
    if arguments.json:
        rows = [attrs.asdict(finding) | {"line": line} for line, finding in located]
        _print(json.dumps(rows, indent=2))
    else:
        places = ["" if line is None else f"{file}:{line}: " for line, _ in located]
        _print(render_findings(findings, _style(), places=places))
        _print(f"\n{judged}: {count_by_level(findings)}")
    grave = {"error", "warning"} if arguments.strict else {"error"}
    return 1 if any(found.level in grave for found in findings) else 0


def _export(arguments: argparse.Namespace) -> int:
    try:
        profile = profile_for(
            arguments.device,
            arguments.recipe,
            num_threads=arguments.num_threads,
            user=dict(arguments.with_),
        )
    except ValueError as error:
        return _complain(str(error))
    judge = _judge(arguments, recipe=RECIPES[arguments.recipe])
    findings = [found for found in judge.environment(profile.as_dict()) if found.level != "note"]
    if findings:
        sys.stderr.write(render_findings(findings, _style()) + "\n")
    if any(found.level == "error" for found in findings):
        return 1
    _print(shell_lines(profile))
    return 0


def _judge(arguments: argparse.Namespace, *, recipe: Recipe | None = None) -> Judge:
    """The judge that the options describe; what they leave open is the recipe's."""
    versions = {
        option: version
        for option in _VERSIONED
        if (version := getattr(arguments, option.replace("-", "_"))) is not None
    }
    facts = RunFacts() if recipe is None else recipe.facts
    told = {
        "training_engine": arguments.training_engine,
        "enforce_eager": arguments.enforce_eager,
        "sleep_mode": arguments.sleep_mode,
        "online_weight_update": arguments.online_weight_update,
        "process_group_timeout_s": arguments.process_group_timeout,
    }
    given = {name: value for name, value in told.items() if value is not None}
    return Judge(
        versions=versions, device_kind=arguments.device, facts=attrs.evolve(facts, **given)
    )


def _script_findings(
    script: Path, judge: Judge, environ: Mapping[str, str]
) -> tuple[list[tuple[int | None, Finding]], str]:
    text = _read(script)
    located = check_script(text, judge, environ=environ)
    return [(at.line, at.finding) for at in located], f"{text.count(chr(10))} lines"


def _read(file: Path) -> str:
    """The text with its own line ends; bytes that are no UTF-8 are as good as any in a comment."""
    return file.read_bytes().decode("utf-8", errors="replace")


def _environment_findings(
    file: Path | None, judge: Judge
) -> tuple[list[tuple[int | None, Finding]], str]:
    environ, lines = dict(os.environ), dict[str, int]()
    if file is not None:
        assignments = parse_env_file(_read(file))
        environ = {name: found.value for name, found in assignments.items()}
        lines = {name: found.line for name, found in assignments.items()}
    located = [(lines.get(found.variable), found) for found in judge.environment(environ)]
    return located, f"{len(environ)} variables"


def _explain(names: Sequence[str]) -> int:
    texts, unknown = list[str](), list[str]()
    for name in names:
        try:
            texts.append(explain(name))
        except UnknownVariableError as error:
            unknown.append(str(error))
    if texts:
        _print("\n\n".join(texts))
    return _complain("; ".join(unknown)) if unknown else 0


def _style() -> Style:
    width = min(max(shutil.get_terminal_size(fallback=(96, 24)).columns, 40), 110)
    return Style(width=width, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)


def _complain(message: str) -> int:
    sys.stderr.write(f"device-env: {message}\n")
    return _USAGE_ERROR


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
