"""What is launched: the arguments and the environment of verl's program.

A script is followed with device-env's reader of shell scripts, not executed. Its function calls are
followed with their arguments, so a function in the place of ``python3`` sees what a script would
hand to it: line continuations, arrays, ``$VARIABLES`` and branches are resolved by the one reader
that also judges the environment.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, final

import attrs

from device_env import ScriptError
from device_env.shell_script import follow_script
from device_env.shell_values import UNKNOWN, Value
from verl_conversion.arithmetic import with_arithmetic_done

Program = Literal["main_ppo", "fully_async"]
"""Which of verl's programs runs."""

PROGRAMS: Mapping[str, Program] = {
    "verl.trainer.main_ppo": "main_ppo",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async",
    "recipe.fully_async_policy.fully_async_main": "fully_async",
}
"""By module, without ``.py`` and with dots."""

_CONFIGS: Mapping[Program, str] = {
    "main_ppo": "ppo_trainer",
    "fully_async": "fully_async_ppo_trainer",
}
_STARTERS = ("python3", "python", "uv", "torchrun", "ray", "accelerate", "conda", "srun")
_PATHS = re.compile(r"[\w./-]*/python[\d.]*(?=[ \t])")
_NAME = "CONVERT_VERL_"
_NOTHING = "\x01nothing"
_MOST = 400


class LaunchError(ValueError):
    """No launch of verl can be read from the input."""


@final
@attrs.frozen(kw_only=True)
class Argument:
    """One argument of verl's program."""

    text: str
    """The argument; ``?`` stands for what only running the script could tell."""

    known: bool = True
    """Whether all of it is known."""


@final
@attrs.frozen(kw_only=True)
class Launch:
    """One call of one of verl's programs."""

    program: Program
    """Which."""

    overrides: tuple[Argument, ...]
    """What hydra is given, in order."""

    environ: Mapping[str, str | None]
    """Variables that the script sets for it; None where the value is not known."""

    dropped: tuple[str, ...] = ()
    """Arguments that are no overrides, such as ``"$@"`` of a script that was given none."""


def read_launches(
    path: Path, *, more: Sequence[str] = (), caller: Mapping[str, str] | None = None
) -> list[Launch]:
    """Every launch of verl in a file: a script, or JSON.

    Args:
        path: a shell script; or .json: a list of arguments, or a table of ``argv`` and ``env``.
        more: arguments that the script is given, which take the place of its ``"$@"``.
        caller: environment variables that the script finds, as far as it depends on them.

    Raises:
        LaunchError: the file cannot be read, or launches nothing of verl's that is known here.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read {path}: {error}") from error
    if path.suffix == ".json":
        argv, environ = _from_json(text, path)
        return [launch_of([*argv, *more], environ)]
    return _from_script(text, path, more, caller or {})


def notes_of(path: Path) -> list[str]:
    """What there is to say about a script as a whole."""
    text = "" if path.suffix == ".json" else path.read_text(encoding="utf-8")
    found: list[str] = []
    if "import torch_npu" in text:
        found.append(
            "trap: the device is told by whether torch_npu can be imported, which it can without "
            "any NPU; device-env's detect_device looks for the device itself"
        )
    return found


def launch_of(argv: Sequence[str], environ: Mapping[str, str | None] | None = None) -> Launch:
    """The launch that these arguments are.

    Raises:
        LaunchError: they start no program of verl's that is known here.
    """
    return _launch([Argument(text=text) for text in argv], environ or {})


def _from_json(text: str, path: Path) -> tuple[list[str], dict[str, str | None]]:
    try:
        found: object = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise LaunchError(f"{path} is not valid JSON: {error}") from error
    argv: object = found.get("argv") if isinstance(found, dict) else found
    environ: object = found.get("env", {}) if isinstance(found, dict) else {}
    if not isinstance(argv, list) or not all(isinstance(item, str) for item in argv):
        raise LaunchError(
            f"{path}: expected a list of arguments, or a table with argv (a list) and env, got "
            f"{type(argv).__name__}"
        )
    if not isinstance(environ, dict) or not all(isinstance(v, str) for v in environ.values()):
        raise LaunchError(f"{path}: expected env to be a table of texts, got {environ!r}")
    return argv, environ


def _from_script(
    text: str, path: Path, more: Sequence[str], caller: Mapping[str, str]
) -> list[Launch]:
    names = dict.fromkeys([*_STARTERS, *_PATHS.findall(text)])
    slots = " ".join(f'{_NAME}{n}="${{{n}-{_NOTHING}}}"' for n in range(1, _MOST + 1))
    functions = "".join(f"{name}() {{ env {slots} true; }}; " for name in names)
    try:
        followed = follow_script(functions + with_arithmetic_done(text), caller)
    except ScriptError as error:
        raise LaunchError(f"{path}: {error}") from error
    launches: list[Launch] = []
    for start in followed.launches:
        argv = _arguments(start.environ)
        if not any(_program_of(argument.text) for argument in argv):
            continue
        environ = {
            name: value.text
            for name, value in start.environ.items()
            if not name.startswith(_NAME) and name not in caller
        }
        launch = _launch(_with_own(path, argv, more), environ)
        if launch not in launches:  # ways may differ in what is of no account here
            launches.append(launch)
    if not launches:
        known = ", ".join(PROGRAMS)
        raise LaunchError(
            f"{path}: no launch of verl was found; expected a command such as python3 -m "
            f"verl.trainer.main_ppo KEY=VALUE ... (known programs: {known}). If another script or "
            "an unknown command starts it, print its arguments there and give them as JSON or "
            "behind --"
        )
    return launches


def _arguments(environ: Mapping[str, Value]) -> list[Argument]:
    found: list[Argument] = []
    for number in range(1, _MOST + 1):
        value = environ.get(f"{_NAME}{number}")
        if value is None or value.marked == _NOTHING:
            break
        found.append(
            Argument(
                text=value.marked.replace(UNKNOWN, "?"),
                known=value.text is not None,
            )
        )
    return found


def _with_own(path: Path, argv: list[Argument], more: Sequence[str]) -> list[Argument]:
    """The script's own arguments in the place of ``"$@"``."""
    if not more:
        return argv
    places = [at for at, argument in enumerate(argv) if argument.text == "?"]
    if len(places) != 1:
        raise LaunchError(
            f'{path}: expected one "$@" among the arguments of verl, through which those behind -- '
            f"would reach it, got {len(places)}"
        )
    own = [Argument(text=text) for text in more]
    return [*argv[: places[0]], *own, *argv[places[0] + 1 :]]


def _program_of(text: str) -> Program | None:
    module = text.removesuffix(".py").replace("/", ".").lstrip(".")
    for known, program in PROGRAMS.items():
        if module == known or module.endswith(f".{known}"):
            return program
    return None


def _launch(argv: Sequence[Argument], environ: Mapping[str, str | None]) -> Launch:
    starts = [at for at, argument in enumerate(argv) if _program_of(argument.text)]
    if not starts:
        known = ", ".join(PROGRAMS)
        raise LaunchError(
            f"expected the arguments of a launch of verl, with one of the programs {known}, got "
            f"{' '.join(argument.text for argument in argv[:6])!r} ..."
        )
    program = _program_of(argv[starts[0]].text)
    assert program is not None  # noqa: S101  # it is one of `starts`
    overrides: list[Argument] = []
    dropped: list[str] = []
    waiting = list(argv[starts[0] + 1 :])
    while waiting:
        argument = waiting.pop(0)
        name, equals, value = argument.text.partition("=")
        if name in {"--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd"}:
            if not equals and waiting:
                value = waiting.pop(0).text
            if name in {"--config-name", "-cn"}:
                _check_config(program, value)
        elif argument.text == "?" or argument.text.startswith("-"):
            dropped.append(argument.text)
        else:
            overrides.append(argument)
    return Launch(
        program=program, overrides=tuple(overrides), environ=environ, dropped=tuple(dropped)
    )


def _check_config(program: Program, value: str) -> None:
    expected = _CONFIGS[program]
    if value.removesuffix(".yaml") != expected:
        raise LaunchError(
            f"--config-name={value}: expected {expected} for {program}; the defaults of other "
            "configurations are not in the tables of this tool"
        )
