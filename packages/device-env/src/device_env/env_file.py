"""Reading an environment file: lines of NAME=value, with or without `export`."""

import re
import shlex
from typing import final

import attrs

from device_env.errors import EnvFileError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@final
@attrs.frozen(kw_only=True)
class Assignment:
    """One variable of an environment file."""

    name: str
    """The variable."""

    value: str
    """Its value, unquoted; nothing is expanded."""

    line: int
    """Line number, from 1."""


def parse_env_file(text: str) -> dict[str, Assignment]:
    """Read assignments by name; a later one replaces an earlier one, as in a shell.

    Values are taken literally: a file that refers to other variables is a script, and a
    `$` outside single quotes is refused rather than passed on unexpanded.

    Raises:
        EnvFileError: a line is no assignment, or refers to another variable.
    """
    assignments: dict[str, Assignment] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        for assignment in _assignments(line, number):
            assignments[assignment.name] = assignment
    return assignments


def _assignments(line: str, number: int) -> list[Assignment]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise EnvFileError(f"line {number}: {error}: {line.strip()!r}") from error
    if words and words[0] == "export":
        words = words[1:]
    if words and "$" in re.sub(r"'[^']*'", "", line):
        raise EnvFileError(
            f"line {number}: expected a literal value, got {line.strip()!r}; "
            "write out what it refers to"
        )
    found: list[Assignment] = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise EnvFileError(f"line {number}: expected NAME=value, got {word!r}")
        found.append(Assignment(name=name, value=value, line=number))
    return found
