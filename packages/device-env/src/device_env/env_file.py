"""Reading an environment file: lines of NAME=value, with or without `export`."""

from typing import final

import attrs

from device_env.errors import EnvFileError, ScriptError
from device_env.shell_syntax import as_assignment
from device_env.shell_words import Operator, Word, read_tokens


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

    Quotes and comments are those of a shell. Values are taken literally: a file that refers to
    other variables or runs commands is a script, and is refused rather than passed on unexpanded.
    No message shows a value, which may be a secret.

    Raises:
        EnvFileError: a line is no assignment, or refers to another variable.
    """
    try:
        tokens = read_tokens(text)
    except ScriptError as error:
        raise EnvFileError(str(error)) from error
    assignments: dict[str, Assignment] = {}
    before: str | None = None
    for token in tokens:
        if isinstance(token, Operator):
            if token.text != "\n":
                raise EnvFileError(
                    f"line {token.line}: expected a literal value, got {token.text!r} outside "
                    "quotes; put the value in quotes"
                )
            before = None
        elif token.plain == "export" and before is None:
            before = "export"
        else:
            found = _assignment(token, before)
            before = found.name
            assignments[found.name] = found
    return assignments


def _assignment(word: Word, before: str | None) -> Assignment:
    read = as_assignment(word)
    if read is None or read.append:
        if before not in {None, "export"}:
            raise EnvFileError(
                f"line {word.line}: expected one word behind {before}=, got several; put the "
                "value in quotes"
            )
        shown = (word.plain or "a word with an expansion").partition("=")[0]
        raise EnvFileError(f"line {word.line}: expected NAME=value, got {shown!r}")
    if read.value.plain is None:
        raise EnvFileError(
            f"line {word.line}: expected a literal value for {read.name}, got one that refers to "
            "something else; write out what it refers to"
        )
    return Assignment(name=read.name, value=read.value.plain, line=word.line)
