"""What a shell script puts into the environment of the processes that it starts.

The script is followed, not executed. A choice that depends on something unknown is followed
both ways; a loop's body is taken to run once; what a command prints is unknown. Variables that
the script does not set are taken from `environ`, and are otherwise unset where a default is
given (`${NAME:-default}`) and unknown where none is.
"""

import fnmatch
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Literal, final

import attrs

from device_env.errors import ScriptError
from device_env.shell_syntax import (
    Assignment,
    Block,
    Branches,
    Command,
    Function,
    Loop,
    Node,
    as_assignment,
    parse_shell,
)
from device_env.shell_words import Dynamic, Literal as Text, Parameter, Word

_MAX_WAYS = 64
_WRAPPERS = frozenset({"exec", "nohup", "command", "setsid", "sudo", "builtin"})
_RUNTIME_ENV = "--runtime-env-json"


@final
@attrs.frozen
class Value:
    """What a variable holds."""

    text: str | None
    """None when only running the script could tell."""

    line: int | None
    """Line that set it; None when it came from the environment of the caller."""

    certain: bool = True
    """False when a default was taken that the caller's environment could replace."""


@final
@attrs.frozen
class ShellSetting:
    """One line that puts a variable into an environment."""

    name: str
    value: Value
    line: int


@final
@attrs.frozen
class Launch:
    """An environment that processes of the script see."""

    environ: Mapping[str, Value]
    line: int
    """Line of the command, or the last line of the script."""


@final
@attrs.frozen(kw_only=True)
class ScriptEnvironment:
    """Everything that a script does to environments."""

    settings: tuple[ShellSetting, ...]
    """Every line that sets an environment variable, whichever way the script goes."""

    launches: tuple[Launch, ...]
    """The environments at the script's end and of commands with variables of their own."""

    unexported: tuple[ShellSetting, ...]
    """Variables that are assigned, never exported and never used: no process sees them."""

    sourced: tuple[tuple[int, str], ...]
    """Lines that read other scripts, whose variables are not known here."""

    every_way: bool
    """False when the script has more ways through it than were followed."""


def follow_script(text: str, environ: Mapping[str, str] | None = None) -> ScriptEnvironment:
    """Follow a script through every way that what is known leaves open.

    Args:
        text: the script.
        environ: what the caller of the script has in its environment, as far as it is known.

    Raises:
        ScriptError: the script cannot be read; the line is named.
    """
    follower = _Follower()
    start = _State(
        variables={name: Value(value, None) for name, value in (environ or {}).items()},
        exported=frozenset(environ or {}),
    )
    ends = follower.body(parse_shell(text), [start])
    follower.finish(ends, text.count("\n", 0, len(text.rstrip())) + 1)
    follower.run_uncalled(ends or [start])
    return follower.result()


@final
@attrs.frozen
class _State:
    """The shell's variables at one point of one way through the script."""

    variables: Mapping[str, Value]
    exported: frozenset[str]
    export_all: bool = False
    flow: Literal["on", "returned", "ended"] = "on"
    status: bool | None = True
    """Whether the last command succeeded; None when unknown."""

    def key(self) -> tuple[object, ...]:
        """Equal for states from which the script goes on alike."""
        held = frozenset((name, value.text) for name, value in self.variables.items())
        return held, self.exported, self.export_all, self.flow, self.status

    def environ(self) -> dict[str, Value]:
        """What a process that is started now sees."""
        return {name: self.variables[name] for name in self.exported if name in self.variables}


class _Follower:
    """Collects what the ways through a script set and start."""

    def __init__(self) -> None:
        self._settings: dict[ShellSetting, None] = {}
        self._launches: dict[tuple[object, ...], Launch] = {}
        self._plain: dict[str, ShellSetting] = {}
        self._exported: set[str] = set()
        self._used: set[str] = set()
        self._sourced: dict[tuple[int, str], None] = {}
        self._functions: dict[str, Function] = {}
        self._called: set[str] = set()
        self._active: list[str] = []
        self._good_exits: list[tuple[_State, int]] = []
        self._every_way = True

    def result(self) -> ScriptEnvironment:
        unexported = (
            setting
            for name, setting in self._plain.items()
            if name not in self._exported and name not in self._used
        )
        return ScriptEnvironment(
            settings=tuple(sorted(self._settings, key=lambda found: (found.line, found.name))),
            launches=tuple(self._launches.values()),
            unexported=tuple(unexported),
            sourced=tuple(self._sourced),
            every_way=self._every_way,
        )

    def finish(self, states: list[_State], line: int) -> None:
        """The environments at the end; for a script that ends in an exit, at its last good one."""
        reached = [(state, line) for state in states if state.flow != "ended"]
        last = max((place for _, place in self._good_exits), default=line)
        for state, place in reached or self._good_exits:
            if reached or place == last:
                self.launch(state, place)

    def run_uncalled(self, states: list[_State]) -> None:
        """Look into functions that the script defines for others."""
        for name in [name for name in self._functions if name not in self._called]:
            self._call(name, states)

    def launch(self, state: _State, line: int) -> None:
        environ = state.environ()
        key: tuple[object, ...] = (
            frozenset((name, value.text) for name, value in environ.items()),
        )
        self._launches.setdefault(key, Launch(environ, line))

    # -- the ways through the script ----------------------------------------------------------

    def body(self, nodes: tuple[Node, ...], states: list[_State]) -> list[_State]:
        for node in nodes:
            going = [state for state in states if state.flow == "on"]
            stopped = [state for state in states if state.flow != "on"]
            states = self._distinct([*stopped, *self._node(node, going)])
        return states

    def _distinct(self, states: list[_State]) -> list[_State]:
        kept = list({state.key(): state for state in states}.values())
        if len(kept) > _MAX_WAYS:
            self._every_way = False
        return kept[:_MAX_WAYS]

    def _node(self, node: Node, states: list[_State]) -> list[_State]:
        if not states:
            return []
        match node:
            case Command():
                return [after for state in states for after in self._command(node, state)]
            case Branches():
                return [after for state in states for after in self._branches(node, state)]
            case Block():
                return self._block(node, states)
            case Loop():
                return self._loop(node, states)
            case Function():
                self._functions[node.name] = node
                return [attrs.evolve(state, status=True) for state in states]

    def _block(self, node: Block, states: list[_State]) -> list[_State]:
        if not node.subshell:
            after = self.body(node.body, states)
            if node.negated:
                return [
                    attrs.evolve(state, status=None if state.status is None else not state.status)
                    for state in after
                ]
            return after
        before = [state.environ() for state in states]
        for inner in self.body(node.body, states):
            if inner.flow == "on" and inner.environ() not in before:
                self.launch(inner, _last_line(node))
        return [attrs.evolve(state, status=None) for state in states]

    def _loop(self, node: Loop, states: list[_State]) -> list[_State]:
        if node.variable is not None:
            only = node.words[0].plain if len(node.words) == 1 else None
            states = [_assign(state, node.variable, Value(only, 1)) for state in states]
        after = self.body(node.body, self.body(node.condition, states))
        return [attrs.evolve(state, status=None) for state in after]

    def _branches(self, node: Branches, state: _State) -> list[_State]:
        if node.subject is not None:
            return self._case(node, self._expand(node.subject, state), state)
        waiting, done = [state], list[_State]()
        for choice in node.choices:
            tested = self.body(choice.condition, waiting)
            done += [after for after in tested if after.flow != "on"]
            going = [after for after in tested if after.flow == "on"]
            taken = [after for after in going if after.status is not False]
            done += self.body(choice.body, taken)
            waiting = [after for after in going if after.status is not True]
        done += self.body(node.otherwise, waiting)
        return self._distinct(done)

    def _case(self, node: Branches, subject: Value, state: _State) -> list[_State]:
        done: list[_State] = []
        for choice in node.choices:
            patterns = [self._expand(pattern, state) for pattern in choice.patterns]
            verdict = _matches(subject, patterns)
            if verdict is not False:
                done += self.body(choice.body, [state])
            if verdict is True:
                return self._distinct(done)
        return self._distinct([*done, state])

    # -- commands -----------------------------------------------------------------------------

    def _command(self, command: Command, state: _State) -> list[_State]:
        if not command.words:
            return [self._assignments(command.assignments, state)]
        own = state
        for assignment in command.assignments:
            own = self._set(own, assignment, exported=True)
        words = _unwrapped(command.words)
        ended = command.words[0].plain == "exec"
        name = words[0].plain
        if name in self._functions and name not in self._active:
            return self._call(name or "", [own])
        if name == "env":
            launched, own = self._env(words[1:], own)
            if launched or command.assignments or ended:
                self.launch(own, command.line)
            return [attrs.evolve(state, flow="ended" if ended else state.flow, status=None)]
        after = self._builtin(name, words, state, command.line)
        if after is not None:
            return [after]
        for word in words:
            self._expand(word, state)
        if not self._runtime_env(words, own) and (command.assignments or ended):
            self.launch(own, command.line)
        return [attrs.evolve(state, flow="ended" if ended else state.flow, status=None)]

    def _assignments(self, assignments: tuple[Assignment, ...], state: _State) -> _State:
        for assignment in assignments:
            visible = state.export_all or assignment.name in state.exported
            state = self._set(state, assignment, exported=visible)
        return attrs.evolve(state, status=True)

    def _call(self, name: str, states: list[_State]) -> list[_State]:
        self._called.add(name)
        self._active.append(name)
        after = self.body(self._functions[name].body, states)
        self._active.pop()
        return [
            attrs.evolve(state, flow="on") if state.flow == "returned" else state for state in after
        ]

    def _env(self, words: list[Word], state: _State) -> tuple[bool, _State]:
        """The environment of `env [-i] [-u NAME] NAME=value ... command`."""
        changed, waiting = False, False
        for word in words:
            assignment = as_assignment(word)
            option = word.plain or ""
            if waiting:
                state, waiting = _unset(state, option), False
            elif assignment is not None:
                state, changed = self._set(state, assignment, exported=True), True
            elif option in {"-i", "-", "--ignore-environment"}:
                state, changed = attrs.evolve(state, exported=frozenset()), True
            elif option in {"-u", "--unset"}:
                waiting, changed = True, True
            elif not option.startswith("-"):
                break
        return changed, state

    def _builtin(  # noqa: C901, PLR0911, PLR0912 - one arm per builtin
        self, name: str | None, words: list[Word], state: _State, line: int
    ) -> _State | None:
        """The state after a builtin command; None for any other command."""
        match name:
            case "export" | "declare" | "typeset" | "local" | "readonly":
                return self._declare(name, words[1:], state)
            case "unset":
                for word in words[1:]:
                    state = _unset(state, word.plain or "")
                return attrs.evolve(state, status=True)
            case "set":
                return _set_options(state, [word.plain or "" for word in words[1:]])
            case "source" | ".":
                path = self._expand(words[1], state) if len(words) > 1 else Value("", line)
                self._sourced[line, path.text or "another script"] = None
                return attrs.evolve(state, status=None)
            case "read" | "getopts":
                for word in words[1:]:
                    if (word.plain or "-").isidentifier():
                        state = _assign(state, word.plain or "", Value(None, line))
                return attrs.evolve(state, status=None)
            case "exit":
                code = self._expand(words[1], state).text if len(words) > 1 else "0"
                if code in {"0", None}:
                    self._good_exits.append((state, line))
                return attrs.evolve(state, flow="ended")
            case "return":
                return attrs.evolve(state, flow="returned", status=None)
            case "true" | ":":
                for word in words[1:]:
                    self._expand(word, state)
                return attrs.evolve(state, status=True)
            case "false":
                return attrs.evolve(state, status=False)
            case "[" | "test" | "[[":
                values = [self._expand(word, state) for word in words[1:]]
                if name != "test":
                    values = values[:-1]
                return attrs.evolve(state, status=_test(values))
            case _:
                return None

    def _declare(self, name: str, words: list[Word], state: _State) -> _State:
        options = {word.plain for word in words if (word.plain or "").startswith("-")}
        exporting = (name == "export" and "-n" not in options) or any(
            "x" in (option or "") for option in options
        )
        for word in words:
            if word.plain in options:
                continue
            assignment = as_assignment(word)
            if assignment is not None:
                visible = exporting or state.export_all or assignment.name in state.exported
                state = self._set(state, assignment, exported=visible)
            elif word.plain is not None and exporting:
                state = self._export(state, word.plain, word.line)
            elif word.plain is not None and name == "export":
                state = attrs.evolve(state, exported=state.exported - {word.plain})
        return attrs.evolve(state, status=True)

    def _export(self, state: _State, name: str, line: int) -> _State:
        """`export NAME` for a variable that may have been assigned before."""
        self._exported.add(name)
        held = state.variables.get(name)
        if held is not None:
            self._settings[ShellSetting(name, held, held.line or line)] = None
        return attrs.evolve(state, exported=state.exported | {name})

    def _set(self, state: _State, assignment: Assignment, *, exported: bool) -> _State:
        value = self._expand(assignment.value, state)
        if assignment.append:
            before = state.variables.get(assignment.name)
            known = before is not None and before.text is not None and value.text is not None
            text = f"{before.text}{value.text}" if known and before is not None else None
            value = attrs.evolve(value, text=text)
        name, line = assignment.name, assignment.value.line
        setting = ShellSetting(name, value, line)
        after = _assign(state, name, value)
        if exported:
            self._exported.add(name)
            self._settings[setting] = None
            return attrs.evolve(after, exported=after.exported | {name})
        self._plain.setdefault(name, setting)
        return after

    def _runtime_env(self, words: list[Word], state: _State) -> bool:
        """Variables that `ray job submit --runtime-env-json` gives to the job."""
        for index, word in enumerate(words):
            text = self._expand(word, state).text or ""
            if text == _RUNTIME_ENV and index + 1 < len(words):
                text, line = self._expand(words[index + 1], state).text or "", words[index + 1].line
            elif text.startswith(f"{_RUNTIME_ENV}="):
                text, line = text.partition("=")[2], word.line
            else:
                continue
            environ = {
                name: Value(value, line + text[: text.find(f'"{name}"')].count("\n"))
                for name, value in _env_vars(text, line)
            }
            for name, held in environ.items():
                self._settings[ShellSetting(name, held, held.line or line)] = None
            if environ:
                self._launches.setdefault((line, text), Launch(environ, line))
            return True
        return False

    # -- values -------------------------------------------------------------------------------

    def _expand(self, word: Word, state: _State) -> Value:
        """The text of a word, as far as it is known."""
        texts: list[str] = []
        known = certain = True
        for part in word.parts:
            match part:
                case Text(text):
                    texts.append(text)
                case Dynamic(text):
                    known = False
                    self._used.update(_names_in(text))
                case Parameter():
                    value = self._parameter(part, state, word.line)
                    certain = certain and value.certain
                    known = known and value.text is not None
                    texts.append(value.text or "")
        return Value("".join(texts) if known else None, word.line, certain)

    def _parameter(self, part: Parameter, state: _State, line: int) -> Value:
        self._used.add(part.name)
        held = state.variables.get(part.name)
        operator = part.operator
        if operator == "" or part.argument is None:
            return Value(None, line) if held is None else held
        if operator in {":?", "?"}:
            return Value(None, line) if held is None else held
        argument = self._expand(part.argument, state)
        if held is not None and held.text is None:
            return held
        empty = held is None or (operator.startswith(":") and held.text == "")
        certain = argument.certain if held is None else held.certain
        certain = certain and held is not None
        if operator in {":+", "+"}:
            return Value("", line, certain) if empty else argument
        return attrs.evolve(argument, certain=certain) if empty or held is None else held


def _unwrapped(command: tuple[Word, ...]) -> list[Word]:
    """A command without `exec`, `nohup` and the like in front of it."""
    words = list(command)
    while words[0].plain in _WRAPPERS and len(words) > 1:
        words.pop(0)
        while len(words) > 1 and (words[0].plain or "").startswith("-"):
            words.pop(0)
    return words


def _assign(state: _State, name: str, value: Value) -> _State:
    return attrs.evolve(state, variables={**state.variables, name: value})


def _unset(state: _State, name: str) -> _State:
    variables = {key: value for key, value in state.variables.items() if key != name}
    return attrs.evolve(state, variables=variables, exported=state.exported - {name})


def _set_options(state: _State, options: list[str]) -> _State:
    """`set -a`, `set -o allexport` and their opposites."""
    for option, following in itertools.zip_longest(options, options[1:]):
        sign, letters = option[:1], option[1:]
        named = letters.endswith("o") and following == "allexport"
        if sign in {"-", "+"} and ("a" in letters or named):
            state = attrs.evolve(state, export_all=sign == "-")
    return attrs.evolve(state, status=True)


def _matches(subject: Value, patterns: list[Value]) -> bool | None:
    """Whether a `case` takes this arm; None when unknown."""
    if any(pattern.text == "*" for pattern in patterns):
        return True
    if subject.text is None or not subject.certain or any(p.text is None for p in patterns):
        return None
    return any(fnmatch.fnmatchcase(subject.text, pattern.text or "") for pattern in patterns)


def _test(values: list[Value]) -> bool | None:
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


def _env_vars(text: str, line: int) -> Iterator[tuple[str, str]]:
    """Names and values of `env_vars` in the JSON text of a Ray runtime environment."""
    if not text:
        return
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ScriptError(f"line {line}: {_RUNTIME_ENV} takes JSON: {error}") from error
    variables = found.get("env_vars", {}) if isinstance(found, dict) else {}
    for name, value in variables.items():
        yield str(name), str(value)


def _names_in(text: str) -> set[str]:
    """Names of variables in text that is not looked into, such as a command substitution."""
    cleaned = "".join(c if c.isalnum() or c == "_" else " " for c in text)
    return set(cleaned.split())


def _last_line(node: Node) -> int:
    match node:
        case Command():
            return node.line
        case Block() | Loop() | Function() if node.body:
            return _last_line(node.body[-1])
        case _:
            return 1
