"""Words and operators of a shell script, each with its line, and what can be said of their value.

Covers what launch scripts are made of: quotes, continuation lines, comments, here-documents,
arrays, parameter expansion, command substitution. Nothing is executed; what only running could
tell stays unknown. The word behind `<<` is the text of the here-document.

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
_OPERATOR = re.compile("|".join(map(re.escape, _OPERATORS)))
REDIRECTIONS = frozenset({"<", ">", ">>", ">|", ">&", "<&", "<>", "&>", "&>>", "<<<", "<<", "<<-"})
"""Operators whose next word names a file, a descriptor or a text, not an argument."""

_MAX_INNER = 20
_DEFAULTS = (":-", ":=", ":+", ":?", "-", "=", "+", "?")
_PARAMETER = re.compile(r"(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?P<rest>.*)", re.DOTALL)
_SIMPLE = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PLAIN = re.compile(r"[^\s\\'\"$`~;&|()<>]+")
_PLAIN_QUOTED = re.compile(r"[^\\\"$`]+")
_PLAIN_INNER = re.compile(r"[^\s\\'\"#$<(){}\[\]]+")
_ARRAY_START = re.compile(r"[A-Za-z_]\w*\+?=\Z")
_TILDE_START = re.compile(r"(?:[A-Za-z_]\w*\+?=(?:.*:)?)?\Z", re.DOTALL)
_ELEMENTS = re.compile(r"(?P<name>[A-Za-z_]\w*)\[[@*]\](?::?[-+].*)?", re.DOTALL)
_INDIRECT = re.compile(r"!(?P<name>[A-Za-z_]\w*)")


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
    """Empty for the plain value, `[@]` for all elements of an array, `!` for the variable that
    this one names, else one of `:-`, `:=`, `:+`, `:?` with or without the colon."""

    argument: "Word | None" = None


@final
@attrs.frozen
class Dynamic:
    """What only running the script could tell."""

    text: str


@final
@attrs.frozen
class Array:
    """`(...)` behind `NAME=`."""

    words: tuple["Word", ...]


Part = Literal | Parameter | Dynamic | Array


@final
@attrs.frozen
class Word:
    """One word of a command."""

    parts: tuple[Part, ...]
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


def read_tokens(text: str, line: int = 1) -> list[Token]:
    """Split a script into words and operators; `line` is the number of its first line.

    Raises:
        ScriptError: a quote, a bracket or a here-document is not closed.
    """
    return _Reader(text.replace("\r\n", "\n"), line).tokens()


class _Reader:
    """A position in the text of a script."""

    def __init__(self, text: str, line: int) -> None:
        self._text = text
        self._position = 0
        self._line = line
        self._here_documents: list[_HereDocument] = []

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
                for document in self._waiting():
                    found[document.place] = self._here_text(document)
                continue
            found.append(Operator(operator, self._line))
            self._advance(len(operator))
            if operator in {"<<", "<<-"}:
                found.append(self._here_document(operator, len(found)))
        for document in self._waiting():
            found[document.place] = self._here_text(document)
        return found

    def whole(self, *, in_quotes: bool) -> Word:
        """All of the text as one word, as in the default of `${name:-default}`.

        Inside double quotes a single quote is a character like any other.
        """
        parts: list[Part] = []
        quoted = in_quotes
        while self._position < len(self._text):
            if in_quotes and self._at("'"):
                _append(parts, self._advance(1))
            else:
                quoted = self._part(parts) or quoted
        return Word(tuple(parts), self._line, quoted)

    def here_word(self) -> Word:
        """All of the text as the word of a here-document in which variables are expanded."""
        line, parts = self._line, list[Part]()
        while self._position < len(self._text):
            self._quoted_part(parts)
        return Word(tuple(parts), line, quoted=True)

    # -- characters ---------------------------------------------------------------------------

    def _at(self, text: str) -> bool:
        return self._text.startswith(text, self._position)

    def _advance(self, count: int) -> str:
        taken = self._text[self._position : self._position + count]
        self._position += len(taken)
        self._line += taken.count("\n")
        return taken

    def _run(self, plain: re.Pattern[str]) -> str:
        """Take characters that mean nothing but themselves, or one that does."""
        found = plain.match(self._text, self._position)
        return self._advance(1 if found is None else len(found.group()))

    def _operator(self) -> str | None:
        found = _OPERATOR.match(self._text, self._position)
        return None if found is None else found.group()

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

    # -- here-documents -----------------------------------------------------------------------

    def _here_document(self, operator: str, place: int) -> Word:
        """Read the word behind `<<`, and remember that a text up to it follows."""
        self._skip_blanks()
        word = self._word()
        document = _HereDocument(word.plain or "", operator == "<<-", word.quoted, place)
        self._here_documents.append(document)
        return word

    def _waiting(self) -> list["_HereDocument"]:
        """The here-documents whose text begins on this line."""
        waiting, self._here_documents = self._here_documents, []
        return waiting

    def _here_text(self, document: "_HereDocument") -> Word:
        """Read a text up to its last line."""
        started, lines = self._line, list[str]()
        while True:
            if self._position >= len(self._text):
                message = (
                    f"line {started}: the here-document up to {document.delimiter!r} has no end"
                )
                raise ScriptError(message)
            end = self._text.find("\n", self._position)
            size = (len(self._text) if end < 0 else end + 1) - self._position
            line = self._advance(size)
            line = line.lstrip("\t") if document.without_tabs else line
            if line.removesuffix("\n") == document.delimiter:
                break
            lines.append(line)
        text = "".join(lines)
        if document.quoted:
            return Word((Literal(text),), started, quoted=True)
        return _Reader(text, started).here_word()

    # -- words --------------------------------------------------------------------------------

    def _word(self) -> Word:
        line = self._line
        parts: list[Part] = []
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
                    parts.append(self._array())
                    continue
                break
            quoted = self._part(parts) or quoted
        return Word(_joined(parts), line, quoted)

    def _array(self) -> Array:
        self._advance(1)
        line = self._line
        inside = self._balanced("(", ")").removesuffix(")")
        return Array(tuple(t for t in _Reader(inside, line).tokens() if isinstance(t, Word)))

    def _part(self, parts: list[Part]) -> bool:
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
            case "~" if _TILDE_START.match(_text_of(parts)):
                parts.append(Dynamic(self._advance(1)))
            case _:
                _append(parts, self._run(_PLAIN))
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

    def _double_quotes(self, parts: list[Part]) -> None:
        line = self._line
        self._advance(1)
        while self._position < len(self._text):
            character = self._text[self._position]
            if character == '"':
                self._advance(1)
                return
            self._quoted_part(parts)
        raise ScriptError(f'line {line}: the quote " is not closed')

    def _quoted_part(self, parts: list[Part]) -> None:
        """Read the next piece of double-quoted text or of a here-document."""
        character = self._text[self._position]
        if character == "\\" and self._text[self._position + 1 : self._position + 2] in {
            *'$`"\\\n'
        }:
            self._advance(1)
            taken = self._advance(1)
            _append(parts, "" if taken == "\n" else taken)
        elif character in "$`":
            self._expansion(parts, in_quotes=True)
        else:
            _append(parts, self._run(_PLAIN_QUOTED))

    def _expansion(self, parts: list[Part], *, in_quotes: bool = False) -> None:
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
            parts.append(Dynamic("$(" + self._balanced("(", ")", commands=True)))
        elif self._at("$["):
            self._advance(2)
            parts.append(Dynamic("$[" + self._balanced("[", "]")))
        elif self._at("${"):
            line = self._line
            self._advance(2)
            inside = self._balanced("{", "}", in_quotes=in_quotes).removesuffix("}")
            parts.append(_parameter(inside, line, in_quotes=in_quotes))
        else:
            self._advance(1)
            name = _SIMPLE.match(self._text, self._position)
            if name is None:
                _append(parts, "$")
            else:
                parts.append(Parameter(self._advance(len(name.group()))))

    def _balanced(
        self,
        opening: str,
        closing: str,
        *,
        depth: int = 1,
        commands: bool = False,
        in_quotes: bool = False,
    ) -> str:
        """Text up to and with the bracket that closes what was just opened."""
        line, start = self._line, self._position
        while self._position < len(self._text):
            character = self._text[self._position]
            if character == "\\":
                self._advance(2)
            elif character == "'" and not in_quotes:
                self._single_quotes()
            elif character == '"':
                self._double_quotes([])
            elif character == "#" and self._text[self._position - 1] in " \t\n" and opening == "(":
                self._skip_blanks()
            elif commands and self._inner_command():
                continue
            else:
                depth += (character == opening) - (character == closing)
                self._run(_PLAIN_INNER)
                if depth == 0:
                    return self._text[start : self._position]
        raise ScriptError(f"line {line}: the bracket {opening} is not closed")

    def _inner_command(self) -> bool:
        """Pass over what only commands have: arithmetic with `<<` in it, and here-documents."""
        if self._at("$(("):
            self._advance(3)
            self._balanced("(", ")", depth=2)
        elif self._at("<<") and not self._at("<<<"):
            operator = "<<-" if self._at("<<-") else "<<"
            self._advance(len(operator))
            self._here_document(operator, 0)
        elif self._at("\n"):
            self._advance(1)
            for document in self._waiting():
                self._here_text(document)
        else:
            return False
        return True


@final
@attrs.frozen
class _HereDocument:
    """A text that begins on the next line."""

    delimiter: str
    without_tabs: bool
    quoted: bool
    """Whether the delimiter is quoted, so that nothing in the text is expanded."""
    place: int
    """Index of its word among the tokens."""


def _parameter(inside: str, line: int, *, in_quotes: bool) -> Parameter | Dynamic:
    elements, indirect = _ELEMENTS.fullmatch(inside), _INDIRECT.fullmatch(inside)
    if elements is not None:
        return Parameter(elements["name"], "[@]")
    if indirect is not None:
        return Parameter(indirect["name"], "!")
    found = _PARAMETER.fullmatch(inside)
    if found is None or inside.count("${") > _MAX_INNER:
        return Dynamic("${" + inside + "}")
    name, rest = found["name"], found["rest"]
    if not rest:
        return Parameter(name)
    for operator in _DEFAULTS:
        if rest.startswith(operator):
            argument = _Reader(rest.removeprefix(operator), line).whole(in_quotes=in_quotes)
            return Parameter(name, operator, argument)
    return Dynamic("${" + inside + "}")


def _text_of(parts: list[Part]) -> str:
    """What stands before the next piece, as far as it is text."""
    return "".join(part.text if isinstance(part, Literal) else "$" for part in parts)


def _append(parts: list[Part], text: str) -> None:
    last = parts[-1] if parts else None
    if isinstance(last, Literal):
        parts[-1] = Literal(last.text + text)
    else:
        parts.append(Literal(text))


def _joined(
    parts: list[Part],
) -> tuple[Part, ...]:
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, Literal):
            _append(joined, part.text)
        else:
            joined.append(part)
    return tuple(joined)
