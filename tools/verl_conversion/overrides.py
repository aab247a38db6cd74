"""One override of hydra's command line, read by hydra's own rules.

Source: hydra 1.3.8, hydra/grammar/OverrideLexer.g4 and OverrideParser.g4. Hydra's parser is not a
dependency: its generated code needs an antlr4 runtime that excludes the one that math-verify needs.
The cases of the tests were read with it. What only hydra's multirun can take (a sweep such as
``a=1,2``) is refused here as hydra refuses it outside of one.
"""

import re
from collections.abc import Callable, Mapping
from typing import Literal, final

import attrs

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]
"""What a value can be. Keys of a table are text here; hydra keeps numbers as they are."""

Operation = Literal["set", "add", "force", "delete"]
"""``key=``, ``+key=``, ``++key=``, ``~key``."""

_OPERATIONS: Mapping[str, Operation] = {"": "set", "+": "add", "++": "force", "~": "delete"}
_ID = r"[A-Za-z_][A-Za-z0-9_-]*"
_SPECIAL = r"[A-Za-z_$][A-Za-z0-9_$-]*"
_PATH = rf"(?:{_SPECIAL}|0|[1-9](?:_?\d)*)(?:\.(?:{_SPECIAL}|0|[1-9](?:_?\d)*))+"
_KEY = re.compile(
    rf"(?P<sign>\+\+|\+|~|)(?P<key>{_PATH}|{_ID}(?:/{_ID})+|{_SPECIAL})"
    rf"(?:@(?P<package>{_PATH}|{_SPECIAL}|))?(?P<equals>=[ \t]*)?"
)
_INT = r"(?:0|[1-9](?:_?\d)*)"
_POINT = rf"(?:{_INT}?\.\d(?:_?\d)*|{_INT}\.)"
_EXPONENT = rf"(?:{_POINT}|{_INT})[eE][+-]?\d(?:_?\d)*"
_NUMBER = rf"[+-]?(?:{_EXPONENT}|{_POINT}|[Ii][Nn][Ff]|[Nn][Aa][Nn])"
# in the order in which hydra's lexer prefers them where two match the same length
_TOKENS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("open", re.compile(r"[ \t]*\([ \t]*")),
    ("comma", re.compile(r"[ \t]*,[ \t]*")),
    ("close", re.compile(r"[ \t]*\)")),
    ("list", re.compile(r"\[[ \t]*")),
    ("list end", re.compile(r"[ \t]*\]")),
    ("table", re.compile(r"\{[ \t]*")),
    ("table end", re.compile(r"[ \t]*\}")),
    ("colon", re.compile(r"[ \t]*:[ \t]*")),
    ("equals", re.compile(r"[ \t]*=[ \t]*")),
    ("float", re.compile(_NUMBER)),
    ("int", re.compile(rf"[+-]?{_INT}")),
    ("bool", re.compile(r"(?i:true|false)")),
    ("null", re.compile(r"(?i:null)")),
    ("char", re.compile(r"[/\-\\+.$%*@?|]")),
    ("id", re.compile(_ID)),
    ("escape", re.compile(r"(?:\\[\\()\[\]{}:=, \t])+")),
    ("space", re.compile(r"[ \t]+")),
    ("quoted", re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)),
    ("interpolation", re.compile(r"\$\{[^}]+\}")),
)
_SWEEPS = frozenset({"choice", "range", "interval", "glob", "tag"})
_ONE_VALUE = "hydra takes several values in a multirun only; give one value"
_MOST_DIGITS = 4000
_WORDS = frozenset(
    {"id", "null", "int", "float", "bool", "interpolation", "char", "colon", "escape", "space"}
)
_CASTS: Mapping[str, Callable[[str], Value]] = {
    "int": lambda text: int(float(text)),
    "float": float,
    "str": str,
}


class OverrideError(ValueError):
    """Hydra would refuse this override, or takes it in a multirun only."""


class UnreadOverrideError(OverrideError):
    """Hydra may take this override, and this reader does not know what it makes of it."""


@final
@attrs.frozen(kw_only=True)
class Override:
    """One override, taken apart."""

    text: str
    """As it was given."""

    key: str
    """Dotted path, or the name of a group of configurations such as ``model_engine``."""

    value: Value
    """What it says; None for a deletion without a value too."""

    operation: Operation = "set"
    """What hydra does with it."""


@final
@attrs.frozen
class _Token:
    kind: str
    text: str


def parse_override(text: str) -> Override:
    """Read one override.

    Raises:
        OverrideError: with what hydra would not take.
    """
    found = _KEY.match(text)
    deletes = text.startswith("~")
    if found is None or not (found["equals"] or (deletes and found.end() == len(text))):
        raise OverrideError(f"expected KEY=VALUE, +KEY=VALUE, ++KEY=VALUE or ~KEY, got {text!r}")
    if found["package"] is not None:
        raise UnreadOverrideError(
            f"{text!r} chooses configurations for another place (@), which is not read here"
        )
    value: Value = None
    if found["equals"]:
        try:
            value = _Reader(text, _tokens(text, found.end())).whole()
        except RecursionError as error:
            raise UnreadOverrideError(f"{text[:60]}...: nested deeper than is read") from error
    return Override(text=text, key=found["key"], value=value, operation=_OPERATIONS[found["sign"]])


def _tokens(text: str, position: int) -> list[_Token]:
    """The longest token at each place, as hydra's lexer takes it."""
    tokens: list[_Token] = []
    while position < len(text):
        best = _Token("", "")
        for kind, pattern in _TOKENS:
            found = pattern.match(text, position)
            if found is not None and len(found.group()) > len(best.text):
                best = _Token(kind, found.group())
        if not best.text:
            raise OverrideError(
                f"{text!r}: hydra takes no {text[position]!r} outside of quotes; put the value in "
                "quotes that reach hydra, such as KEY='\"VALUE\"' in bash"
            )
        tokens.append(best)
        position += len(best.text)
    return tokens


@final
class _Reader:
    """A position among the tokens of one value."""

    def __init__(self, text: str, tokens: list[_Token]) -> None:
        self._text = text
        self._tokens = tokens
        self._position = 0

    def whole(self) -> Value:
        """The value up to the end; nothing at all is the empty text."""
        if not self._tokens:
            return ""
        value = self._element()
        if self._kind() == "comma":
            raise OverrideError(
                f"{self._text!r} is a sweep; {_ONE_VALUE}, or put a list in brackets"
            )
        if self._kind():
            raise self._unexpected()
        return value

    def _kind(self, ahead: int = 0) -> str:
        place = self._position + ahead
        return self._tokens[place].kind if place < len(self._tokens) else ""

    def _take(self, kind: str) -> _Token:
        if self._kind() != kind:
            raise self._unexpected()
        self._position += 1
        return self._tokens[self._position - 1]

    def _unexpected(self) -> OverrideError:
        rest = "".join(token.text for token in self._tokens[self._position :])
        seen = repr(rest) if rest else "the end"
        return OverrideError(f"{self._text!r}: hydra does not take {seen} here")

    def _element(self) -> Value:
        match self._kind():
            case "list":
                return self._list()
            case "table":
                return self._table()
            case "quoted":
                return _unquoted(self._take("quoted").text)
            case "id" if self._kind(1) == "open":
                return self._function()
            case _:
                return self._primitive(_WORDS)

    def _list(self) -> list[Value]:
        self._take("list")
        values: list[Value] = []
        while self._kind() != "list end":
            if values:
                self._take("comma")
            values.append(self._element())
        self._take("list end")
        return values

    def _table(self) -> dict[str, Value]:
        self._take("table")
        values: dict[str, Value] = {}
        while self._kind() != "table end":
            if values:
                self._take("comma")
            key = self._primitive(_WORDS - {"colon", "interpolation"})
            self._take("colon")
            values[str(key)] = self._element()
        self._take("table end")
        return values

    def _function(self) -> Value:
        name = self._take("id").text
        self._take("open")
        cast = _CASTS.get(name)
        if name in _SWEEPS:
            raise OverrideError(f"{self._text!r}: {name}() is a sweep; {_ONE_VALUE}")
        if cast is None:
            raise UnreadOverrideError(
                f"{self._text!r}: {name}() is not read here; write the value that it gives"
            )
        value = self._element()
        self._take("close")
        try:
            return cast(str(value))
        except (ValueError, OverflowError) as error:
            raise OverrideError(f"{self._text!r}: {error}") from error

    def _primitive(self, kinds: frozenset[str]) -> Value:
        taken: list[_Token] = []
        while self._kind() in kinds:
            taken.append(self._tokens[self._position])
            self._position += 1
        while taken and taken[0].kind == "space":
            taken = taken[1:]
        while taken and taken[-1].kind == "space":
            taken = taken[:-1]
        if not taken:
            raise self._unexpected()
        if len(taken) == 1:
            return _typed(taken[0])
        return "".join(_plain(token) for token in taken)


def _typed(token: _Token) -> Value:
    match token.kind:
        case "null":
            return None
        case "bool":
            return token.text.lower() == "true"
        case "int" if len(token.text) > _MOST_DIGITS:
            raise UnreadOverrideError(
                f"{token.text[:20]}...: expected at most {_MOST_DIGITS} digits"
            )
        case "int":
            return int(token.text)
        case "float":
            return float(token.text)
        case _:
            return _plain(token)


def _plain(token: _Token) -> str:
    return re.sub(r"\\(.)", r"\1", token.text) if token.kind == "escape" else token.text


def _unquoted(text: str) -> str:
    """The text between quotes; a backslash counts in front of a quote only."""
    quote, inside = text[0], text[1:-1]
    whole = re.sub(rf"((?:\\\\)*)\\{quote}", lambda m: "\\" * (len(m[1]) // 2) + quote, inside)
    trailing = re.search(r"(?:\\\\)+\Z", inside)
    return whole if trailing is None else whole[: -len(trailing.group()) // 2]
