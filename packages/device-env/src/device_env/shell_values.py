"""What a shell's variables hold, and what words become, as far as that is known.

A text that is known in part keeps the mark `UNKNOWN` where the rest would stand, so that the
name of `NAME=$(date)` is known and its value is not.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Literal, final

import attrs

from device_env.shell_words import Array, Dynamic, Literal as Text, Parameter, Part, Word

UNKNOWN = "\0"
"""Stands for what only running the script could tell; no shell word can hold it."""

_PATTERN = frozenset("*?[")
_MAX_TEXT = 1 << 20
_MAX_ELEMENTS = 10_000


@final
@attrs.frozen
class Value:
    """What a variable holds, or a word becomes."""

    marked: str
    """The text, with `UNKNOWN` where only running the script could tell."""

    line: int | None
    """Line that set it; None when it came from the environment of the caller."""

    certain: bool = True
    """False when a default was taken that the caller's environment could replace."""

    @property
    def text(self) -> str | None:
        """The text; None when it is not known in full."""
        return None if UNKNOWN in self.marked else self.marked


@final
@attrs.frozen
class State:
    """The shell's variables at one point of one way through the script."""

    variables: Mapping[str, Value]
    exported: frozenset[str]
    arrays: Mapping[str, tuple[Value, ...]] = attrs.field(factory=dict)
    export_all: bool = False
    flow: Literal["on", "broken", "returned", "ended"] = "on"
    status: bool | None = True
    """Whether the last command succeeded; None when unknown."""

    def key(self) -> tuple[object, ...]:
        """Equal for states from which the script goes on alike."""
        held = frozenset((name, value.marked) for name, value in self.variables.items())
        lists = frozenset(
            (name, tuple(value.marked for value in values)) for name, values in self.arrays.items()
        )
        return held, lists, self.exported, self.export_all, self.flow, self.status

    def environ(self) -> dict[str, Value]:
        """What a process that is started now sees."""
        return {name: self.variables[name] for name in self.exported if name in self.variables}

    def assigned(self, name: str, value: Value) -> "State":
        """The state after `name=value`."""
        return attrs.evolve(self, variables={**self.variables, name: value})

    def without(self, names: Iterable[str]) -> "State":
        """The state after `unset`."""
        gone = set(names)
        return attrs.evolve(
            self,
            variables={key: value for key, value in self.variables.items() if key not in gone},
            arrays={key: value for key, value in self.arrays.items() if key not in gone},
            exported=self.exported - gone,
        )


class Expander:
    """Turns words into text, and remembers which variables the script uses itself."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def fields(self, words: Iterable[Word], state: State) -> list[Value]:
        """The arguments that words become; arrays and unquoted variables become several."""
        return [value for word in words for value in self._fields(word, state)]

    def expand(self, word: Word, state: State) -> Value:
        """The text of a word that stays one word, as in an assignment."""
        marked, certain, line = "", True, word.line
        for part in word.parts:
            value = self._part(part, state, word.line)
            if value is None:
                marked += UNKNOWN
                continue
            marked += value.marked
            certain = certain and value.certain
            if "\n" in value.marked and value.line is not None:
                line = value.line  # a text of several lines stands where its variable was set
        return Value(marked if len(marked) <= _MAX_TEXT else UNKNOWN, line, certain)

    def elements(self, words: Iterable[Word], state: State) -> tuple[Value, ...]:
        """The elements of an array; one that is unknown for an array that grows without end."""
        values = tuple(self.fields(words, state))
        return values if len(values) <= _MAX_ELEMENTS else (Value(UNKNOWN, values[0].line),)

    def _fields(self, word: Word, state: State) -> list[Value]:
        parts = [part for part in word.parts if part != Text("")]
        only = parts[0] if len(parts) == 1 else None
        if isinstance(only, Parameter) and only.operator == "[@]":
            self.used.add(only.name)
            return list(state.arrays.get(only.name, (Value(UNKNOWN, word.line),)))
        value = self.expand(word, state)
        if isinstance(only, Parameter) and not word.quoted:
            return [attrs.evolve(value, marked=piece) for piece in value.marked.split()]
        return [value]

    def _part(self, part: Part, state: State, line: int) -> Value | None:
        match part:
            case Text(text):
                return Value(text, None)
            case Dynamic(text):
                self.used.update(_names_in(text))
                return None
            case Array(words):
                self.fields(words, state)
                return None
            case Parameter():
                return self._parameter(part, state, line)

    def _parameter(self, part: Parameter, state: State, line: int) -> Value | None:
        self.used.add(part.name)
        held, operator = state.variables.get(part.name), part.operator
        if operator == "[@]":
            return None
        if operator == "!":
            named = None if held is None else held.text
            return None if named is None else self._parameter(Parameter(named), state, line)
        if part.argument is None or operator in {":?", "?"}:
            return held
        argument = self.expand(part.argument, state)
        if held is not None and held.text is None:
            return held
        empty = held is None or (operator.startswith(":") and held.text == "")
        certain = held is not None and held.certain and argument.certain
        if operator in {":+", "+"}:
            return Value("", line, certain) if empty else argument
        return attrs.evolve(argument, certain=certain) if empty or held is None else held


def assigning_parameters(words: Iterable[Word]) -> Iterable[Parameter]:
    """Every `${NAME:=word}` in words, inner ones first."""
    for word in words:
        for part in word.parts:
            if isinstance(part, Parameter) and part.argument is not None:
                yield from assigning_parameters([part.argument])
                if part.operator in {":=", "="}:
                    yield part


def matches(subject: Value, patterns: list[Value]) -> bool | None:
    """Whether a `case` takes this arm; None when unknown."""
    if any(pattern.text == "*" for pattern in patterns):
        return True
    if subject.text is None or not subject.certain or any(p.text is None for p in patterns):
        return None
    return any(fnmatch.fnmatchcase(subject.text, pattern.marked) for pattern in patterns)


def test_status(values: list[Value]) -> bool | None:
    """The status of `[ ... ]` for a comparison or a test for emptiness; None when unknown."""
    texts = [value.text for value in values]
    if any(text is None for text in texts) or not all(value.certain for value in values):
        return None
    match texts:
        case [str(left), "=" | "==", str(right)]:
            return fnmatch.fnmatchcase(left, right)
        case [str(left), "!=", str(right)]:
            return not fnmatch.fnmatchcase(left, right)
        case ["-z", str(text)]:
            return text == ""
        case ["-n", str(text)]:
            return text != ""
        case _:
            return None


def is_pattern(word: Word) -> bool:
    """Whether file names may take the place of this word."""
    return not word.quoted and any(
        isinstance(part, Text) and _PATTERN & set(part.text) for part in word.parts
    )


def _names_in(text: str) -> set[str]:
    """Names of variables in text that is not looked into, such as a command substitution."""
    cleaned = "".join(c if c.isalnum() or c == "_" else " " for c in text)
    return set(cleaned.split())
