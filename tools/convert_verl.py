"""Turn a launch of verl into a recipe's configuration, and say what becomes of every override.

    ./run tools/convert_verl.py run_dapo.sh
    ./run tools/convert_verl.py run_dapo.sh -o recipe.toml --train-rows 17398
    ./run tools/convert_verl.py arguments.json --json
    ./run tools/convert_verl.py -- python3 -m verl.trainer.main_ppo data.train_batch_size=16 ...

The input is a shell script, a JSON file (a list of arguments, or a table with argv and env), or the
arguments themselves behind --; behind a script, -- gives what takes the place of its "$@". Nothing
of it is executed. The exit status is 0 when everything is carried over, 1 when something has to be
looked at, and 2 when the input cannot be read or the output not be written.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version
from verl_conversion.conversion import convert
from verl_conversion.environment import judge_environment
from verl_conversion.launches import Launch, LaunchError, launch_of, notes_of, read_launches
from verl_conversion.recipe_file import completed, problems_of, recipe_toml
from verl_conversion.releases import RELEASES, Release
from verl_conversion.report import Report, print_report, report_json

_UNREADABLE = 2


def main(arguments: Sequence[str]) -> int:
    """Convert one launch; the exit status."""
    own, separator, behind = _split(arguments)
    options = _options(own)
    try:
        if options.input is None and not separator:
            raise LaunchError("expected a script, a JSON file, or arguments behind --")  # noqa: TRY301
        report, settings_text = _converted(options, behind)
    except LaunchError as error:
        print(f"convert_verl: {error}", file=sys.stderr)
        return _UNREADABLE
    if options.json:
        print(json.dumps(report_json(report), indent=1))
    else:
        print_report(report)
    if options.output is not None:
        try:
            options.output.write_text(settings_text, encoding="utf-8")
        except OSError as error:
            print(f"convert_verl: cannot write {options.output}: {error}", file=sys.stderr)
            return _UNREADABLE
        print(f"wrote {options.output}", file=sys.stderr)
    return 1 if report.undecided else 0


def _split(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """What is ours, whether there is a --, and what stands behind it."""
    found = list(arguments)
    if "--" not in found:
        return found, False, []
    at = found.index("--")
    return found[:at], True, found[at + 1 :]


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("input", nargs="?", type=Path, help="a .sh or .json file")
    parser.add_argument(
        "--verl",
        choices=RELEASES,
        default=RELEASES[-1],
        help="release that the launch is for, whose defaults and readers count (%(default)s)",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="TOML", help="write the settings")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--train-rows",
        type=int,
        metavar="N",
        help="number of training prompts, where the run's length is given in epochs",
    )
    parser.add_argument(
        "--way", type=int, metavar="N", help="which way through the script, where there are several"
    )
    parser.add_argument(
        "--with",
        action="append",
        default=[],
        dest="caller",
        metavar="NAME=VALUE",
        help="an environment variable that the script finds, such as DEVICE=gpu",
    )
    parser.add_argument(
        "--has",
        action="append",
        default=[],
        metavar="NAME==VERSION",
        help="what stands beside verl, such as vllm-ascend==0.23.0, to judge variables with",
    )
    return parser.parse_args(arguments)


def _converted(options: argparse.Namespace, behind: list[str]) -> tuple[Report, str]:
    script: Path | None = options.input
    caller = dict(_pair(text) for text in options.caller)
    launches = (
        [launch_of(behind)] if script is None else read_launches(script, more=behind, caller=caller)
    )
    launch, notes = _chosen(launches, options.way)
    if script is not None:
        notes += notes_of(script)
    release: Release = options.verl
    conversion = convert(launch, release, train_rows=options.train_rows)
    source = "the arguments" if script is None else script.name
    text = recipe_toml(
        completed(conversion.settings),
        heading=f"Made by tools/convert_verl.py from {source}, verl {release}; behind each value "
        "stands what of\nverl it comes from (without actor_rollout_ref.), or that nothing there "
        "says it.",
    )
    report = Report(
        source=source,
        conversion=conversion,
        environment=judge_environment(
            launch,
            conversion.composed,
            script=script if script is not None and script.suffix != ".json" else None,
            versions=_versions(options.has),
        ),
        notes=notes,
        problems=problems_of(text),
    )
    return report, text


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise LaunchError(f"--with: expected NAME=VALUE, got {text!r}")
    return name, value


def _versions(given: list[str]) -> dict[str, str]:
    versions: dict[str, str] = {}
    for text in given:
        name, equals, version = text.partition("==")
        try:
            versions[name] = str(Version(version))
        except InvalidVersion as error:
            raise LaunchError(f"--has: expected NAME==VERSION, got {text!r}") from error
        if not equals or not name:
            raise LaunchError(f"--has: expected NAME==VERSION, got {text!r}")
    return versions


def _chosen(launches: list[Launch], way: int | None) -> tuple[Launch, list[str]]:
    """The launch to convert, and what is to be said about the choice."""
    if way is not None and not 1 <= way <= len(launches):
        raise LaunchError(f"--way: expected 1 to {len(launches)}, got {way}")
    launch = launches[(way or 1) - 1]
    if len(launches) == 1 or way is not None:
        return launch, []
    first = f"the script starts verl in {len(launches)} ways; this is the first"
    notes = [f"{first}; choose with --way N, or with --with NAME=VALUE for what decides"]
    texts = {argument.text for argument in launch.overrides}
    for number, other in enumerate(launches[1:], start=2):
        added = [argument.text for argument in other.overrides if argument.text not in texts]
        there = {argument.text for argument in other.overrides}
        gone = [text for text in texts if text not in there]
        notes.append(
            f"way {number} has {', '.join(added) or 'nothing else'}"
            + (f", and not {', '.join(sorted(gone))}" if gone else "")
        )
    return launch, notes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
