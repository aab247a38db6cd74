"""Words and operators of a shell script, each with its line, and what can be said of their value.

Covers what launch scripts are made of: quotes, continuation lines, comments, here-documents,
arrays, parameter expansion, command substitution. Nothing is executed; what only running could
tell stays unknown.

Source: Bash Reference Manual 5.2, sections 3.1.2 (quoting) and 3.5 (expansions).
"""

import re
from typing import final

import attrs

from device_env.errors import ScriptError

_OPERATORS = (
    ";;&", "<<<", "<<-", "&>>",
    ";;", ";&", "&&", "&>", "||", "|&", "<<", "<&", "<>", ">>", ">&", ">|",
    ";", "&", "|", "(", ")", "<", ">", "\n",
)  # fmt: skip
REDIRECTIONS = frozenset({"<", ">", ">>", ">|", ">&", "<&", "<>", "&>", "&>>", "<<<", "<<", "<<-"})
"""Operators whose next word names a file, a descriptor or a text, not an argument."""

_DEFAULTS = (":-", ":=", ":+", ":?", "-", "=", "+", "?")
_PARAMETER = re.compile(r"(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?P<rest>.*)", re.DOTALL)
_SIMPLE = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ARRAY_START = re.compile(r"[A-Za-z_]\w*\+?=\Z")


@final
@attrs.frozen
class Literal:
    """Text as it is."""

    text: str


@final
@attrs.frozen
class Parameter:
    """`$name`, or `${name:-word}` with an operator."""

    name: str
    operator: str = ""
    argument: "Word | None" = None


@final
@attrs.frozen
class Dynamic:
    """What only running the script could tell."""

    text: str


@final
@attrs.frozen
class Word:
    """One word of a command."""

    parts: tuple[Literal | Parameter | Dynamic, ...]
    """What it is put together from."""

    line: int
    """Line on which it starts, from 1."""

    quoted: bool = False
    """Whether any of it is quoted; a quoted word is no keyword."""

    @property
    def plain(self) -> str | None:
        """The text of a word without expansions; None for any other."""
        texts = [part.text for part in self.parts if isinstance(part, Literal)]
        return "".join(texts) if len(texts) == len(self.parts) else None


@final
@attrs.frozen
class Operator:
    """What separates words: `;`, `&&`, a line end, `<`."""

    text: str
    line: int


Token = Word | Operator


def read_tokens(text: str) -> list[Token]:
    """Split a script into words and operators.

    Raises:
        ScriptError: a quote, a bracket or a here-document is not closed.
    """
    return _Reader(text.replace("\r\n", "\n"), 1).tokens()


class _Reader:
    """A position in the text of a script."""

    def __init__(self, text: str, line: int) -> None:
        self._text = text
        self._position = 0
        self._line = line
        self._here_documents: list[tuple[str, bool]] = []

    def tokens(self) -> list[Token]:
        found: list[Token] = []
        while self._skip_blanks():
            if self._at("(("):
                line = self._line
                self._advance(2)
                found.append(Word((Dynamic(self._balanced("(", ")", depth=2)),), line))
                continue
            operator = None if self._at_process_substitution() else self._operator()
            if operator is None:
                found.append(self._word())
                continue
            if operator == "\n":
                found.append(Operator("\n", self._line))
                self._advance(1)
                self._skip_here_documents()
                continue
            found.append(Operator(operator, self._line))
            self._advance(len(operator))
            if operator in {"<<", "<<-"}:
                self._skip_blanks()
                word = self._word()
                found.append(word)
                self._here_documents.append((word.plain or "", operator == "<<-"))
        return found

    def whole(self) -> Word:
        """All of the text as one word, as in the default of `${name:-default}`."""
        parts: list[Literal | Parameter | Dynamic] = []
        quoted = False
        while self._position < len(self._text):
            quoted = self._part(parts) or quoted
        return Word(tuple(parts), self._line, quoted)

    # -- characters ---------------------------------------------------------------------------

    def _at(self, text: str) -> bool:
        return self._text.startswith(text, self._position)

    def _advance(self, count: int) -> str:
        taken = self._text[self._position : self._position + count]
        self._position += len(taken)
        self._line += taken.count("\n")
        return taken

    def _operator(self) -> str | None:
        return next((operator for operator in _OPERATORS if self._at(operator)), None)

    def _at_process_substitution(self) -> bool:
        return self._at("<(") or self._at(">(")

    def _skip_blanks(self) -> bool:
        """Move to the next token; False at the end."""
        while self._position < len(self._text):
            character = self._text[self._position]
            if character in " \t":
                self._advance(1)
            elif self._at("\\\n"):
                self._advance(2)
            elif character == "#":
                end = self._text.find("\n", self._position)
                self._advance((len(self._text) if end < 0 else end) - self._position)
            else:
                return True
        return False

    def _skip_here_documents(self) -> None:
        for delimiter, tabs in self._here_documents:
            started = self._line
            while True:
                if self._position >= len(self._text):
                    message = f"line {started}: the here-document up to {delimiter!r} has no end"
                    raise ScriptError(message)
                end = self._text.find("\n", self._position)
                size = (len(self._text) if end < 0 else end + 1) - self._position
                line = self._advance(size).removesuffix("\n")
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    break
        self._here_documents.clear()

    # -- words --------------------------------------------------------------------------------

    def _word(self) -> Word:
        line = self._line
        parts: list[Literal | Parameter | Dynamic] = []
        quoted = False
        while self._position < len(self._text):
            character = self._text[self._position]
            if self._at("\\\n"):
                self._advance(2)
                continue
            if character in " \t\n":
                break
            if self._at_process_substitution():
                parts.append(Dynamic(self._advance(2) + self._balanced("(", ")")))
                continue
            if self._operator() is not None:
                head = parts[0] if len(parts) == 1 else None
                if character == "(" and isinstance(head, Literal) and _ARRAY_START.match(head.text):
                    self._advance(1)
                    parts.append(Dynamic("(" + self._balanced("(", ")")))
                    continue
                break
            quoted = self._part(parts) or quoted
        return Word(_joined(parts), line, quoted)

    def _part(self, parts: list[Literal | Parameter | Dynamic]) -> bool:
        """Read the next piece of a word; True when it was quoted."""
        character = self._text[self._position]
        match character:
            case "\\":
                self._advance(1)
                taken = self._advance(1)
                if taken != "\n":
                    parts.append(Literal(taken))
                return True
            case "'":
                parts.append(Literal(self._single_quotes()))
                return True
            case '"':
                parts.append(Literal(""))
                self._double_quotes(parts)
                return True
            case "$" if self._at("$'"):
                self._advance(1)
                parts.append(Dynamic(self._single_quotes()))
                return True
            case "$" | "`":
                self._expansion(parts)
            case "~" if not parts:
                parts.append(Dynamic(self._advance(1)))
            case _:
                _append(parts, self._advance(1))
        return False

    def _single_quotes(self) -> str:
        line = self._line
        self._advance(1)
        end = self._text.find("'", self._position)
        if end < 0:
            raise ScriptError(f"line {line}: the quote ' is not closed")
        taken = self._advance(end - self._position)
        self._advance(1)
        return taken

    def _double_quotes(self, parts: list[Literal | Parameter | Dynamic]) -> None:
        line = self._line
        self._advance(1)
        while self._position < len(self._text):
            character = self._text[self._position]
            if character == '"':
                self._advance(1)
                return
            if character == "\\" and self._text[self._position + 1 : self._position + 2] in {
                *'$`"\\\n'
            }:
                self._advance(1)
                taken = self._advance(1)
                _append(parts, "" if taken == "\n" else taken)
            elif character in "$`":
                self._expansion(parts)
            else:
                _append(parts, self._advance(1))
        raise ScriptError(f'line {line}: the quote " is not closed')

    def _expansion(self, parts: list[Literal | Parameter | Dynamic]) -> None:
        if self._at("`"):
            line = self._line
            self._advance(1)
            end = self._text.find("`", self._position)
            if end < 0:
                raise ScriptError(f"line {line}: the quote ` is not closed")
            parts.append(Dynamic(self._advance(end - self._position)))
            self._advance(1)
        elif self._at("$(("):
            self._advance(3)
            parts.append(Dynamic("$((" + self._balanced("(", ")", depth=2)))
        elif self._at("$("):
            self._advance(2)
            parts.append(Dynamic("$(" + self._balanced("(", ")")))
        elif self._at("${"):
            line = self._line
            self._advance(2)
            parts.append(_parameter(self._balanced("{", "}").removesuffix("}"), line))
        else:
            self._advance(1)
            name = _SIMPLE.match(self._text, self._position)
            if name is None:
                _append(parts, "$")
            else:
                parts.append(Parameter(self._advance(len(name.group()))))

    def _balanced(self, opening: str, closing: str, *, depth: int = 1) -> str:
        """Text up to and with the bracket that closes what was just opened."""
        line, start = self._line, self._position
        while self._position < len(self._text):
            character = self._text[self._position]
            if character == "\\":
                self._advance(2)
            elif character == "'":
                self._single_quotes()
            elif character == '"':
                self._double_quotes([])
            elif character == "#" and self._text[self._position - 1] in " \t\n" and opening == "(":
                self._skip_blanks()
            else:
                depth += (character == opening) - (character == closing)
                self._advance(1)
                if depth == 0:
                    return self._text[start : self._position]
        raise ScriptError(f"line {line}: the bracket {opening} is not closed")


def _parameter(inside: str, line: int) -> Parameter | Dynamic:
    found = _PARAMETER.fullmatch(inside)
    if found is None:
        return Dynamic("${" + inside + "}")
    name, rest = found["name"], found["rest"]
    if not rest:
        return Parameter(name)
    for operator in _DEFAULTS:
        if rest.startswith(operator):
            argument = _Reader(rest.removeprefix(operator), line).whole()
            return Parameter(name, operator, argument)
    return Dynamic("${" + inside + "}")


def _append(parts: list[Literal | Parameter | Dynamic], text: str) -> None:
    last = parts[-1] if parts else None
    if isinstance(last, Literal):
        parts[-1] = Literal(last.text + text)
    else:
        parts.append(Literal(text))


def _joined(
    parts: list[Literal | Parameter | Dynamic],
) -> tuple[Literal | Parameter | Dynamic, ...]:
    joined: list[Literal | Parameter | Dynamic] = []
    for part in parts:
        if isinstance(part, Literal):
            _append(joined, part.text)
        else:
            joined.append(part)
    return tuple(joined)
