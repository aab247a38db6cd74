"""Builtins of a shell that change its variables, its flow, or which of them processes see.

Source: Bash Reference Manual 5.2, section 4 (shell builtin commands).
"""

import itertools
import re
from collections.abc import Callable, Mapping
from typing import final

import attrs

from device_env.shell_commands import ASSIGNMENT, Env
from device_env.shell_record import Record
from device_env.shell_syntax import Assignment, Command, as_assignment
from device_env.shell_values import UNKNOWN, State, Value, assigning_parameters, test_status
from device_env.shell_words import Array, Dynamic, Word

_DECLARING = frozenset({"export", "declare", "typeset", "local", "readonly"})
_COMPUTED = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)")

_Run = Callable[[Command, list[Value], State], State]


@final
class Builtins:
    """The builtins, for a record of what they set."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._table: Mapping[str, _Run] = {
            **dict.fromkeys(_DECLARING, self._declare),
            **dict.fromkeys(("source", "."), self._source),
            **dict.fromkeys(("read", "getopts", "printf", "mapfile", "readarray"), self._read),
            **dict.fromkeys(("break", "continue"), self._break),
            **dict.fromkeys(("true", ":"), lambda _, __, state: _with(state, status=True)),
            **dict.fromkeys(("[", "test", "[["), self._test),
            "false": lambda _, __, state: _with(state, status=False),
            "unset": self._unset,
            "set": self._set_options,
            "shift": self._shift,
            "exit": self._exit,
            "return": lambda _, __, state: attrs.evolve(state, flow="returned", status=None),
            "let": self._compute,
        }

    def run(self, command: Command, argv: list[Value], state: State) -> State | None:
        """The state after a builtin command; None for any other command."""
        if argv and argv[0].marked in self._table:
            return self._table[argv[0].marked](command, argv, state)
        first = command.words[0].parts[:1]
        return self._compute(command, argv, state) if isinstance(first[0], Dynamic) else None

    # -- assignments --------------------------------------------------------------------------

    def assign_defaults(self, command: Command, state: State) -> State:
        """The state in which every `${NAME:=word}` of the command has been assigned."""
        values = [assignment.value for assignment in command.assignments]
        for part in assigning_parameters([*values, *command.words]):
            held = state.variables.get(part.name)
            if part.argument is None or (
                held is not None and (held.marked != "" or part.operator == "=")
            ):
                continue
            value = self._record.expander.expand(part.argument, state)
            value = attrs.evolve(value, certain=False)
            visible = state.export_all or part.name in state.exported
            state = self._give(state, part.name, value, command.line, exported=visible)
        return state

    def assign(self, state: State, assignment: Assignment, *, exported: bool) -> State:
        """The state after NAME=word, in front of a command or alone."""
        name, word = assignment.name, assignment.value
        head = word.parts[0] if len(word.parts) == 1 else None
        if isinstance(head, Array):
            elements = self._record.expander.elements(head.words, state)
            before = state.arrays.get(name, ()) if assignment.append else ()
            return attrs.evolve(state, arrays={**state.arrays, name: (*before, *elements)})
        value = self._record.expander.expand(word, state)
        value = attrs.evolve(value, line=word.line)
        return self._assigned(state, name, value, append=assignment.append, exported=exported)

    def env(self, environment: Env, state: State, *, changed: bool) -> tuple[bool, State]:
        """Whether `env` changes the environment, and what its command sees."""
        if environment.clean:
            state = attrs.evolve(state, exported=frozenset())
        state = state.without(environment.unset)
        for name, value in environment.assigned:
            state = self._give(state, name, value, value.line or 1, exported=True)
        own = environment.clean or environment.unset or environment.assigned
        return changed or bool(own), state

    def _assigned(
        self, state: State, name: str, value: Value, *, append: bool, exported: bool
    ) -> State:
        if append:
            before = state.variables.get(name)
            value = attrs.evolve(
                value, marked=(UNKNOWN if before is None else before.marked) + value.marked
            )
        return self._give(state, name, value, value.line or 1, exported=exported)

    def _give(self, state: State, name: str, value: Value, line: int, *, exported: bool) -> State:
        after = state.assigned(name, value)
        if not exported:
            self._record.plain(name, value, line)
            return after
        self._record.exported.add(name)
        self._record.setting(name, value, line)
        return attrs.evolve(after, exported=after.exported | {name})

    def _declare(self, command: Command, argv: list[Value], state: State) -> State:
        name = argv[0].marked
        options = {value.marked for value in argv[1:] if value.marked[:1] in {"-", "+"}}
        letters = "".join(option for option in options if option.startswith("-"))
        hiding = any(option.startswith("+") and "x" in option for option in options)
        hiding = hiding or (name == "export" and "n" in letters)
        exporting = not hiding and (name == "export" or "x" in letters)
        if name == "export" and "f" in letters:
            return _with(state, status=True)
        for word in _after_name(command.words, name):
            assignment = as_assignment(word)
            if assignment is not None:
                visible = exporting or state.export_all or assignment.name in state.exported
                state = self.assign(state, assignment, exported=visible and not hiding)
                continue
            for value in self._record.expander.fields([word], state):
                state = self._declare_one(state, value, exporting=exporting, hiding=hiding)
        return _with(state, status=True)

    def _declare_one(self, state: State, value: Value, *, exporting: bool, hiding: bool) -> State:
        """An argument of `export` or `declare` that only expansion made a name or NAME=value."""
        text = value.marked
        found = ASSIGNMENT.fullmatch(text)
        if found is not None:
            given = attrs.evolve(value, marked=found["value"])
            visible = exporting or state.export_all or found["name"] in state.exported
            return self._assigned(
                state, found["name"], given, append=bool(found["append"]), exported=visible
            )
        if not text.isidentifier():
            return state
        if hiding:
            return attrs.evolve(state, exported=state.exported - {text})
        return self._export(state, text, value.line or 1) if exporting else state

    def _export(self, state: State, name: str, line: int) -> State:
        """`export NAME`, for a variable that may have been assigned before, here or elsewhere."""
        self._record.exported.add(name)
        held = state.variables.get(name)
        if held is None:
            held = Value(UNKNOWN, line)
            state = state.assigned(name, held)
        self._record.setting(name, held, held.line or line)
        return attrs.evolve(state, exported=state.exported | {name})

    def _unset(self, _: Command, argv: list[Value], state: State) -> State:
        if any(value.marked == "-f" for value in argv[1:]):
            return _with(state, status=True)
        return _with(state.without(value.marked for value in argv[1:]), status=True)

    def _read(self, command: Command, argv: list[Value], state: State) -> State:
        """Builtins that put what they read or print into variables."""
        names = argv[1:]
        if argv[0].marked == "printf":
            names = argv[2:3] if [value.marked for value in argv[1:2]] == ["-v"] else []
        return _unknown(state, [value.marked for value in names], command.line)

    def _compute(self, command: Command, argv: list[Value], state: State) -> State:
        """`((NAME = 1))` and `let NAME=1`."""
        texts = [part.text for part in command.words[0].parts if isinstance(part, Dynamic)]
        texts += [value.marked for value in argv[1:]]
        for text in texts:
            self._record.expander.used.update(re.findall(r"[A-Za-z_]\w*", text))
        names = [name for text in texts for name in _COMPUTED.findall(text)]
        return _unknown(state, names, command.line)

    def _shift(self, _: Command, argv: list[Value], state: State) -> State:
        """Which argument is `$1` after it is not followed."""
        names = [name for name in state.variables if name.isdecimal()]
        return _unknown(state, names, argv[0].line or 1)

    # -- options, tests and flow --------------------------------------------------------------

    def _set_options(self, _: Command, argv: list[Value], state: State) -> State:
        """`set -a`, `set -o allexport` and their opposites."""
        options = [value.marked for value in argv[1:]]
        given = itertools.takewhile(lambda option: option not in {"--", "-"}, options)
        for option, following in itertools.pairwise([*given, ""]):
            sign, letters = option[:1], option[1:]
            named = letters.endswith("o") and following == "allexport"
            if sign in {"-", "+"} and ("a" in letters or named):
                state = attrs.evolve(state, export_all=sign == "-")
        return _with(state, status=True)

    def _source(self, command: Command, argv: list[Value], state: State) -> State:
        path = argv[1].text if len(argv) > 1 else None
        self._record.unseen(command.line, f"reads {path or 'another script'}")
        return _with(state, status=None)

    def _test(self, _: Command, argv: list[Value], state: State) -> State:
        values = argv[1:] if argv[0].marked == "test" else argv[1:-1]
        for option, value in itertools.pairwise(values):
            if option.marked == "-v":
                self._record.expander.used.add(value.marked)
        return _with(state, status=test_status(values))

    def _break(self, _: Command, argv: list[Value], state: State) -> State:
        flow = "broken" if argv[0].marked == "break" else state.flow
        return attrs.evolve(state, flow=flow, status=None)

    def _exit(self, command: Command, argv: list[Value], state: State) -> State:
        if len(argv) == 1 or argv[1].text in {"0", None}:
            self._record.good_exits.append((state, command.line))
        return attrs.evolve(state, flow="ended")


def _with(state: State, *, status: bool | None) -> State:
    return attrs.evolve(state, status=status)


def _unknown(state: State, names: list[str], line: int) -> State:
    """The state in which these variables hold what only running the script could tell."""
    for name in names:
        if name.isidentifier() or name.isdecimal():
            state = state.assigned(name, Value(UNKNOWN, line))
    return _with(state, status=None)


def _after_name(words: tuple[Word, ...], name: str) -> tuple[Word, ...]:
    """The arguments of a builtin, whatever stands in front of it."""
    place = next((index for index, word in enumerate(words) if word.plain == name), 0)
    return words[place + 1 :]
