"""Commands that start other commands, and what they add to their environment.

Sources: GNU coreutils 9.4 manual, `env`; Ray 2.60 documentation, `ray job submit`; verl,
verl/trainer/config/ppo_trainer.yaml (`ray_kwargs.ray_init.runtime_env.env_vars`).
"""

import json
import re
import shlex
from collections.abc import Iterator
from typing import final

import attrs

from device_env.errors import ScriptError
from device_env.shell_values import UNKNOWN, Value

ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<append>\+?)=(?P<value>.*)", re.DOTALL)
SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh"})

_WRAPPERS = frozenset({"exec", "nohup", "command", "builtin", "setsid", "sudo", "time"})
_RUNNERS = frozenset(
    {
        "chrt", "conda", "ionice", "mpiexec", "mpirun", "nice", "numactl", "srun", "stdbuf",
        "taskset", "timeout", "uv", "xargs",
    }
)  # fmt: skip
"""Commands with arguments of their own before the command that they start."""
_RUNTIME_ENV = "--runtime-env-json"
_OVERRIDE = re.compile(
    r"\+{0,2}(?:[\w.]+\.)?env_vars(?:\.(?P<name>[A-Za-z_][A-Za-z0-9_]*))?=(?P<value>.*)", re.DOTALL
)
_ENTRY = re.compile(r"['\"]?(?P<name>[A-Za-z_][A-Za-z0-9_]*)['\"]?\s*:\s*(?P<value>[^,}]*)")
_QUOTED_MIN = 2


@final
@attrs.frozen
class Env:
    """The arguments of `env`, taken apart."""

    clean: bool
    """Whether it starts from nothing (`-i`)."""

    unset: tuple[str, ...]
    assigned: tuple[tuple[str, Value], ...]
    command: tuple[Value, ...]


def base_name(value: Value) -> str:
    """`/usr/bin/env` is `env`."""
    return value.marked.rpartition("/")[2]


def unwrapped(argv: list[Value]) -> list[Value]:
    """A command without `exec`, `nohup`, `timeout 10` and the like in front of it."""
    while len(argv) > 1 and base_name(argv[0]) in _WRAPPERS:
        argv = argv[1:]
        while len(argv) > 1 and argv[0].marked.startswith("-"):
            argv = argv[1:]
    if argv and base_name(argv[0]) in _RUNNERS:
        for index, value in enumerate(argv):
            if base_name(value) == "env" or base_name(value) in SHELLS:
                return argv[index:]
    return argv


def env_command(arguments: list[Value]) -> Env:
    """`env [-i] [-u NAME] NAME=value ... command`."""
    clean, unset, assigned = False, list[str](), list[tuple[str, Value]]()
    waiting = list(arguments)
    while waiting:
        value = waiting.pop(0)
        option = value.marked
        assignment = ASSIGNMENT.fullmatch(option)
        if assignment is not None and not assignment["append"]:
            assigned.append((assignment["name"], attrs.evolve(value, marked=assignment["value"])))
        elif option in {"-i", "-", "--ignore-environment"}:
            clean = True
        elif option in {"-u", "--unset", "-C", "--chdir"} and waiting:
            name = waiting.pop(0).marked
            unset += [name] if option in {"-u", "--unset"} else []
        elif option in {"-S", "--split-string"} and waiting:
            text = waiting.pop(0)
            pieces = [attrs.evolve(text, marked=piece) for piece in _split(text.marked)]
            waiting = [*pieces, *waiting]
        elif option.startswith(("-u", "--unset=")):
            unset.append(option.removeprefix("--unset=").removeprefix("-u"))
        elif not option.startswith("-"):
            waiting.insert(0, value)
            break
    return Env(clean, tuple(unset), tuple(assigned), tuple(waiting))


def script_argument(argv: list[Value]) -> Value | None:
    """The text of `bash -c TEXT`; None for a shell that is called otherwise."""
    for index, value in enumerate(argv[1:], start=1):
        letters = value.marked.startswith("-") and not value.marked.startswith("--")
        if letters and "c" in value.marked and index + 1 < len(argv):
            return argv[index + 1]
    return None


def job_variables(argv: list[Value], line: int) -> dict[str, Value] | None:
    """Variables that `ray job submit --runtime-env-json` gives to the job; None without it.

    Raises:
        ScriptError: the text is known and no JSON.
    """
    for index, argument in enumerate(argv):
        name, equals, text = argument.marked.partition("=")
        if name != _RUNTIME_ENV:
            continue
        if not equals:
            if index + 1 == len(argv):
                return None
            text = argv[index + 1].marked
        start = argv[index + (not equals)].line or line
        return {
            name: Value(held, start + text[: max(text.find(f'"{name}"'), 0)].count("\n"))
            for name, held in _env_vars(text, start)
        }
    return None


def override_variables(argv: list[Value], line: int) -> dict[str, Value]:
    """Variables in overrides such as `+ray_kwargs.ray_init.runtime_env.env_vars.NAME=value`."""
    found: dict[str, Value] = {}
    for value in argv:
        override = _OVERRIDE.fullmatch(value.marked)
        if override is None:
            continue
        start = value.line or line
        if override["name"] is not None:
            found[override["name"]] = Value(_unquoted(override["value"]), start, value.certain)
        else:
            for entry in _ENTRY.finditer(override["value"]):
                found[entry["name"]] = Value(_unquoted(entry["value"]), start, value.certain)
    return found


def _unquoted(text: str) -> str:
    """An override's value without the quotes that its grammar takes off."""
    text = text.strip()
    enclosed = len(text) >= _QUOTED_MIN and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if enclosed else text


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return [UNKNOWN]


def _env_vars(text: str, line: int) -> Iterator[tuple[str, str]]:
    """Names and values of `env_vars` in the JSON text of a Ray runtime environment."""
    if not text.strip(UNKNOWN + " "):
        return
    found = _read_json(text, line)
    variables = found.get("env_vars") if isinstance(found, dict) else None
    for name, value in variables.items() if isinstance(variables, dict) else ():
        if UNKNOWN not in str(name):
            yield str(name), UNKNOWN if value is None else str(value)


def _read_json(text: str, line: int) -> object:
    """The value of a text; what is unknown in it stays so, whether it stands in quotes or not."""
    for attempt in (text, text.replace(UNKNOWN, "null")):
        try:
            return json.loads(attempt, strict=False)
        except json.JSONDecodeError as error:
            refused = error
    if UNKNOWN in text:
        return None
    raise ScriptError(f"line {line}: {_RUNTIME_ENV} takes JSON: {refused}")
