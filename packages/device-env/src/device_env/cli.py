"""The command line: doctor, check, explain. No vendor is imported but by doctor."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
from packaging.version import InvalidVersion, Version

from device_env.check import check_environment
from device_env.device import DEVICE_KINDS
from device_env.doctor import examine
from device_env.env_file import parse_env_file
from device_env.errors import EnvFileError, UnknownVariableError
from device_env.explanation import explain
from device_env.render import Style, count_by_level, render_findings, render_report

_USAGE_ERROR = 2


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
    check.add_argument(
        "--env-file", type=Path, metavar="FILE", help="NAME=value lines; default: this environment"
    )
    for option in ("vllm", "vllm-ascend", "torch-npu", "torch", "ray"):
        check.add_argument(f"--{option}", type=_version, metavar="VERSION")
    check.add_argument("--device", choices=DEVICE_KINDS, help="the device of the run")
    check.add_argument("--strict", action="store_true", help="warnings count as errors")
    check.add_argument("--json", action="store_true", help="for programs")
    explained = commands.add_parser("explain", help="all that is known about a variable")
    explained.add_argument("names", nargs="+", metavar="NAME")
    return parser


def _version(text: str) -> str:
    try:
        Version(text)
    except InvalidVersion as error:
        message = f"expected a version such as 0.32.0, got {text!r}"
        raise argparse.ArgumentTypeError(message) from error
    return text


def _doctor(*, as_json: bool) -> int:
    report = examine(os.environ)
    if as_json:
        _print(json.dumps(attrs.asdict(report) | {"healthy": report.healthy}, indent=2))
    else:
        _print(render_report(report, _style()))
    return 0 if report.healthy else 1


def _check(arguments: argparse.Namespace) -> int:
    file: Path | None = arguments.env_file
    lines: dict[str, int] = {}
    environ = dict(os.environ)
    if file is not None:
        try:
            assignments = parse_env_file(file.read_text(encoding="utf-8"))
        except (OSError, EnvFileError) as error:
            return _complain(f"{file}: {error}")
        environ = {name: found.value for name, found in assignments.items()}
        lines = {name: found.line for name, found in assignments.items()}
    versions = {
        option: version
        for option in ("vllm", "vllm-ascend", "torch-npu", "torch", "ray")
        if (version := getattr(arguments, option.replace("-", "_"))) is not None
    }
    findings = check_environment(environ, versions, device_kind=arguments.device)
    if arguments.json:
        rows = [attrs.asdict(found) | {"line": lines.get(found.variable)} for found in findings]
        _print(json.dumps(rows, indent=2))
    else:
        places = [
            f"{file}:{lines[found.variable]}: " if found.variable in lines else ""
            for found in findings
        ]
        _print(render_findings(findings, _style(), places=places))
        _print(f"\n{len(environ)} variables: {count_by_level(findings)}")
    grave = {"error", "warning"} if arguments.strict else {"error"}
    return 1 if any(found.level in grave for found in findings) else 0


def _explain(names: Sequence[str]) -> int:
    texts: list[str] = []
    for name in names:
        try:
            texts.append(explain(name))
        except UnknownVariableError as error:
            return _complain(str(error))
    _print("\n\n".join(texts))
    return 0


def _style() -> Style:
    width = min(max(shutil.get_terminal_size(fallback=(96, 24)).columns, 40), 110)
    return Style(width=width, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)


def _complain(message: str) -> int:
    sys.stderr.write(f"device-env: {message}\n")
    return _USAGE_ERROR


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
