"""The structure of a shell script: commands, choices and blocks.

Source: Bash Reference Manual 5.2, section 3.2 (shell commands).
"""

import re
from typing import final

import attrs

from device_env.errors import ScriptError
from device_env.shell_words import REDIRECTIONS, Literal, Operator, Token, Word, read_tokens

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<append>\+?)=(?P<value>.*)", re.DOTALL)
_SEPARATORS = frozenset({"\n", ";", "&"})
_DESCRIPTOR = re.compile(r"[0-9]+|\{\w+\}")
_TEXTS = frozenset({"<<", "<<-", "<<<"})
_CASE_ENDS = frozenset({";;", ";&", ";;&"})


@final
@attrs.frozen
class Assignment:
    """`NAME=word` in front of a command, or alone."""

    name: str
    value: Word
    append: bool = False


@final
@attrs.frozen
class Command:
    """A simple command; without words it only assigns."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    line: int
    stdin: Word | None = None
    """The here-document or here-string that it reads."""


@final
@attrs.frozen
class Choice:
    """One arm of an `if` or of a `case`."""

    condition: tuple["Node", ...]
    """Commands whose last status decides; empty for a `case`."""

    patterns: tuple[Word, ...]
    """What the subject of a `case` is compared with; empty for an `if`."""

    body: tuple["Node", ...]

    goes_on: bool = False
    """Whether later patterns are tried after this arm of a `case` (`;;&`)."""


@final
@attrs.frozen
class Branches:
    """Arms of which one runs; the last resort is `otherwise`."""

    choices: tuple[Choice, ...]
    otherwise: tuple["Node", ...] = ()
    subject: Word | None = None


@final
@attrs.frozen
class Block:
    """Commands that belong together; in a subshell their variables end with them."""

    body: tuple["Node", ...]
    subshell: bool = False
    negated: bool = False


@final
@attrs.frozen
class Loop:
    """A loop; its body is taken to run."""

    condition: tuple["Node", ...]
    variable: str | None
    words: tuple[Word, ...]
    body: tuple["Node", ...]


@final
@attrs.frozen
class Function:
    """A function definition."""

    name: str
    body: tuple["Node", ...]


Node = Command | Branches | Block | Loop | Function


def parse_shell(text: str, line: int = 1) -> tuple[Node, ...]:
    """Read the structure of a script; `line` is the number of its first line.

    Raises:
        ScriptError: the script is not what a shell would take, or uses syntax beyond this reader;
            the line is named.
    """
    parser = _Parser(read_tokens(text, line))
    nodes = parser.commands(frozenset())
    parser.expect_end()
    return nodes


class _Parser:
    """A position among the tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._position = 0

    def expect_end(self) -> None:
        if self._position < len(self._tokens):
            token = self._tokens[self._position]
            raise ScriptError(f"line {token.line}: unexpected {_shown(token)}")

    def commands(self, ends: frozenset[str]) -> tuple[Node, ...]:
        """Commands up to a keyword or operator of `ends`, which is left where it is."""
        nodes: list[Node] = []
        while True:
            while self._operator() in _SEPARATORS:
                self._position += 1
            if self._ends(ends):
                return tuple(nodes)
            node = self._and_or(ends)
            background = self._operator() == "&"
            nodes.append(Block((node,), subshell=True) if background else node)

    # -- looking ------------------------------------------------------------------------------

    def _token(self) -> Token | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def _operator(self) -> str | None:
        token = self._token()
        return token.text if isinstance(token, Operator) else None

    def _keyword(self) -> str | None:
        token = self._token()
        return token.plain if isinstance(token, Word) and not token.quoted else None

    def _ends(self, ends: frozenset[str]) -> bool:
        token = self._token()
        if token is None:
            return True
        if isinstance(token, Operator):
            return token.text in ends or token.text == ")"
        return self._keyword() in ends

    def _line(self) -> int:
        token = self._token() or (self._tokens[-1] if self._tokens else None)
        return 1 if token is None else token.line

    def _take(self, text: str) -> None:
        if self._operator() != text and self._keyword() != text:
            token = self._token()
            seen = "the end of the script" if token is None else _shown(token)
            raise ScriptError(f"line {self._line()}: expected {text!r}, got {seen}")
        self._position += 1

    def _skip_newlines(self) -> None:
        while self._operator() == "\n":
            self._position += 1

    # -- lists and pipelines ------------------------------------------------------------------

    def _and_or(self, ends: frozenset[str]) -> Node:
        node = self._pipeline(ends)
        while self._operator() in {"&&", "||"}:
            both = self._operator() == "&&"
            self._position += 1
            self._skip_newlines()
            right = self._pipeline(ends)
            choice = Choice(condition=(node,), patterns=(), body=(right,) if both else ())
            node = Branches(choices=(choice,), otherwise=() if both else (right,))
        return node

    def _pipeline(self, ends: frozenset[str]) -> Node:
        negated = self._keyword() == "!"
        if negated:
            self._position += 1
        if self._keyword() == "time":
            self._position += 1
        elements = [self._command(ends)]
        while self._operator() in {"|", "|&"}:
            self._position += 1
            self._skip_newlines()
            elements.append(self._command(ends))
        if len(elements) > 1:
            return Block(tuple(Block((element,), subshell=True) for element in elements))
        return Block((elements[0],), negated=True) if negated else elements[0]

    # -- commands -----------------------------------------------------------------------------

    def _command(self, ends: frozenset[str]) -> Node:
        node: Node
        if self._operator() == "(":
            self._position += 1
            node = Block(self.commands(frozenset({")"})), subshell=True)
            self._take(")")
        else:
            match self._keyword():
                case "if":
                    node = self._if()
                case "case":
                    node = self._case()
                case "for" | "select":
                    node = self._for()
                case "while" | "until":
                    self._position += 1
                    condition = self.commands(frozenset({"do"}))
                    node = Loop(condition, None, (), self._do())
                case "{":
                    self._position += 1
                    node = Block(self.commands(frozenset({"}"})))
                    self._take("}")
                case "function":
                    self._position += 1
                    name = self._keyword() or ""
                    self._position += 1
                    if self._operator() == "(":
                        self._position += 1
                        self._take(")")
                    node = self._function(name, ends)
                case _:
                    return self._simple(ends)
        self._redirections()
        return node

    def _if(self) -> Branches:
        choices: list[Choice] = []
        otherwise: tuple[Node, ...] = ()
        self._take("if")
        while True:
            condition = self.commands(frozenset({"then"}))
            self._take("then")
            body = self.commands(frozenset({"elif", "else", "fi"}))
            choices.append(Choice(condition=condition, patterns=(), body=body))
            if self._keyword() != "elif":
                break
            self._take("elif")
        if self._keyword() == "else":
            self._take("else")
            otherwise = self.commands(frozenset({"fi"}))
        self._take("fi")
        return Branches(tuple(choices), otherwise)

    def _case(self) -> Branches:
        self._take("case")
        subject = self._any_word()
        self._skip_newlines()
        self._take("in")
        choices, falls = list[Choice](), list[bool]()
        self._skip_newlines()
        while self._keyword() != "esac":
            if self._operator() == "(":
                self._position += 1
            patterns = [self._any_word()]
            while self._operator() == "|":
                self._position += 1
                patterns.append(self._any_word())
            self._take(")")
            body = self.commands(_CASE_ENDS | {"esac"})
            end = self._operator()
            choices.append(
                Choice(condition=(), patterns=tuple(patterns), body=body, goes_on=end == ";;&")
            )
            falls.append(end == ";&")
            if end in _CASE_ENDS:
                self._position += 1
            self._skip_newlines()
        self._take("esac")
        for index in reversed(range(len(choices) - 1)):
            if falls[index]:  # `;&` goes on with the commands of the next arm
                body = choices[index].body + choices[index + 1].body
                choices[index] = attrs.evolve(choices[index], body=body)
        return Branches(tuple(choices), subject=subject)

    def _for(self) -> Loop:
        self._position += 1
        variable = self._keyword()
        self._any_word()
        words: list[Word] = []
        self._skip_newlines()
        if self._keyword() == "in":
            self._position += 1
            while isinstance(token := self._token(), Word):
                words.append(token)
                self._position += 1
        return Loop((), variable, tuple(words), self._do())

    def _do(self) -> tuple[Node, ...]:
        while self._operator() in _SEPARATORS:
            self._position += 1
        braces = self._keyword() == "{"
        self._take("{" if braces else "do")
        end = "}" if braces else "done"
        body = self.commands(frozenset({end}))
        self._take(end)
        return body

    def _function(self, name: str, ends: frozenset[str]) -> Function:
        self._skip_newlines()
        return Function(name, (self._command(ends),))

    def _any_word(self) -> Word:
        token = self._token()
        if not isinstance(token, Word):
            seen = "the end of the script" if token is None else _shown(token)
            raise ScriptError(f"line {self._line()}: expected a word, got {seen}")
        self._position += 1
        return token

    def _simple(self, ends: frozenset[str]) -> Node:
        line, start = self._line(), self._position
        stdin: Word | None = None
        assignments: list[Assignment] = []
        words: list[Word] = []
        while True:
            stdin = self._redirections() or stdin
            token = self._token()
            if not isinstance(token, Word):
                break
            assignment = None if words else as_assignment(token)
            self._position += 1
            if assignment is not None:
                assignments.append(assignment)
                continue
            words.append(token)
            if token.plain == "[[" and not token.quoted and len(words) == 1:
                self._conditional(words)
            elif len(words) == 1 and self._operator() == "(" and token.plain is not None:
                self._position += 1
                self._take(")")
                return self._function(token.plain, ends)
        token = self._token()
        if isinstance(token, Operator) and self._position == start:
            raise ScriptError(f"line {line}: unexpected {_shown(token)}")
        return Command(tuple(assignments), tuple(words), line, stdin)

    def _conditional(self, words: list[Word]) -> None:
        while (token := self._token()) is not None:
            self._position += 1
            if isinstance(token, Operator):
                if token.text != "\n":
                    words.append(_as_word(token.text, token.line))
                continue
            words.append(token)
            if token.plain == "]]":
                return
        raise ScriptError(f"line {words[0].line}: [[ is not closed")

    def _redirections(self) -> Word | None:
        """Pass over redirections; the text that a here-document or here-string gives."""
        stdin: Word | None = None
        while True:
            token = self._token()
            after = self._position + 1
            following = self._tokens[after] if after < len(self._tokens) else None
            if isinstance(token, Operator) and token.text in REDIRECTIONS:
                self._position += 1
                target = self._token()
                if isinstance(target, Word):
                    self._position += 1
                    stdin = target if token.text in _TEXTS else stdin
            elif (
                isinstance(token, Word)
                and not token.quoted
                and _DESCRIPTOR.fullmatch(token.plain or "")
                and isinstance(following, Operator)
                and following.text in REDIRECTIONS
            ):
                self._position += 1
            else:
                return stdin


def _as_word(text: str, line: int) -> Word:
    """An operator as the plain word that it is inside `[[ ]]`."""
    return Word((Literal(text),), line, quoted=True)


def as_assignment(word: Word) -> Assignment | None:
    """A word of the form NAME=value, taken apart; None for any other."""
    head = word.parts[0] if word.parts else None
    if not isinstance(head, Literal):
        return None
    found = _ASSIGNMENT.fullmatch(head.text)
    if found is None:
        return None
    rest = word.parts[1:]
    parts = (Literal(found["value"]), *rest) if found["value"] else rest
    value = Word(parts, word.line, word.quoted)
    return Assignment(found["name"], value, append=bool(found["append"]))


def _shown(token: Token) -> str:
    if isinstance(token, Operator):
        return "a line end" if token.text == "\n" else repr(token.text)
    return repr(token.plain) if token.plain is not None else "a word"
