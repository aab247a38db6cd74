"""What a shell script puts into the environment of the processes that it starts.

The script is followed, not executed. A choice that depends on something unknown is followed
both ways; a loop over known words is followed for each of them, any other once; what a command
prints is unknown. Variables that the script does not set are taken from `environ`, and are
otherwise unset where a default is given (`${NAME:-default}`) and unknown where none is.
"""

from collections.abc import Mapping
from typing import final

import attrs

from device_env.errors import ScriptError
from device_env.shell_builtins import Builtins
from device_env.shell_commands import (
    SHELLS,
    base_name,
    env_command,
    job_variables,
    override_variables,
    script_argument,
    unwrapped,
)
from device_env.shell_record import Launch, Record, ScriptEnvironment
from device_env.shell_syntax import (
    Assignment,
    Block,
    Branches,
    Command,
    Function,
    Loop,
    Node,
    parse_shell,
)
from device_env.shell_values import UNKNOWN, State, Value, is_pattern, matches

__all__ = ["Launch", "ScriptEnvironment", "follow_script"]

_MAX_WAYS = 64
_MAX_TURNS = 64
_MAX_DEPTH = 8
_MAX_COMMANDS = 20_000


def follow_script(text: str, environ: Mapping[str, str] | None = None) -> ScriptEnvironment:
    """Follow a script through every way that what is known leaves open.

    Args:
        text: the script.
        environ: what the caller of the script has in its environment, as far as it is known.

    Raises:
        ScriptError: the script cannot be read; the line is named.
    """
    text = text.replace(UNKNOWN, "")  # as bash does
    follower = _Follower()
    start = State(
        variables={name: Value(value, None) for name, value in (environ or {}).items()},
        exported=frozenset(environ or {}),
    )
    try:
        ends = follower.body(parse_shell(text), [start])
        follower.finish(ends, text.count("\n", 0, len(text.rstrip())) + 1)
        follower.run_uncalled(ends or [start])
    except RecursionError as error:
        raise ScriptError("the script is nested deeper than this reader follows") from error
    return follower.record.result()


@final
class _Follower:
    """Goes through the structure of a script; what it meets is kept in a `Record`."""

    def __init__(self) -> None:
        self.record = Record()
        self._builtins = Builtins(self.record)
        self._functions: dict[str, Function] = {}
        self._called: set[str] = set()
        self._active: list[str] = []
        self._commands = 0
        self._turns = 1
        self._depth = 0

    def finish(self, states: list[State], line: int) -> None:
        """The environments at the end; for a script that ends in an exit, at its last good one."""
        reached = [(state, line) for state in states if state.flow != "ended"]
        exits = self.record.good_exits
        last = max((place for _, place in exits), default=line)
        for state, place in reached or exits:
            if reached or place == last:
                self.record.launch(state, place)

    def run_uncalled(self, states: list[State]) -> None:
        """Look into functions that the script defines for others."""
        for name in [name for name in self._functions if name not in self._called]:
            self._call(name, (), states)

    # -- the ways through the script ----------------------------------------------------------

    def body(self, nodes: tuple[Node, ...], states: list[State]) -> list[State]:
        for node in nodes:
            going = [state for state in states if state.flow == "on"]
            stopped = [state for state in states if state.flow != "on"]
            states = self._distinct([*stopped, *self._node(node, going)])
        return states

    def _distinct(self, states: list[State]) -> list[State]:
        if len(states) < 2:  # noqa: PLR2004 - nothing to compare
            return states
        kept = list({state.key(): state for state in states}.values())
        if len(kept) > _MAX_WAYS:
            self.record.every_way = False
        return kept[:_MAX_WAYS]

    def _node(self, node: Node, states: list[State]) -> list[State]:
        if not states:
            return []
        match node:
            case Command():
                self._commands += 1
                if self._commands > _MAX_COMMANDS:
                    message = f"line {node.line}: expected at most {_MAX_COMMANDS} commands to "
                    raise ScriptError(message + "follow; loops and calls multiply them")
                return [after for state in states for after in self._command(node, state)]
            case Branches():
                return [after for state in states for after in self._branches(node, state)]
            case Block():
                return self._block(node, states)
            case Loop():
                return [after for state in states for after in self._loop(node, state)]
            case Function():
                self._functions[node.name] = node
                return [attrs.evolve(state, status=True) for state in states]

    def _block(self, node: Block, states: list[State]) -> list[State]:
        if node.subshell:
            self._subshell(node.body, states, _last_line(node))
            return [attrs.evolve(state, status=None) for state in states]
        after = self.body(node.body, states)
        if not node.negated:
            return after
        return [
            attrs.evolve(state, status=None if state.status is None else not state.status)
            for state in after
        ]

    def _subshell(
        self, body: tuple[Node, ...], states: list[State], line: int, *, always: bool = False
    ) -> None:
        """Commands whose variables end with them; the environment at their end is a launch.

        Unless they were started with variables of their own (`always`), it must differ.
        """
        before = [] if always else [state.environ() for state in states]
        exits = len(self.record.good_exits)
        inside = self.body(body, states)
        left = [state for state in inside if state.flow == "on"]
        left += [state for state, _ in self.record.good_exits[exits:]]
        del self.record.good_exits[exits:]
        for state in left:
            if state.environ() not in before:
                self.record.launch(state, line)

    def _loop(self, node: Loop, state: State) -> list[State]:
        values = [Value(UNKNOWN, None)]
        if node.variable is not None and not any(map(is_pattern, node.words)):
            values = self.record.expander.fields(node.words, state) or values
        if self._turns * len(values) > _MAX_TURNS:
            values = [Value(UNKNOWN, None)]
        self._turns *= len(values)
        states, done = [state], list[State]()
        for value in values:
            if node.variable is not None:
                states = [before.assigned(node.variable, value) for before in states]
            turned = self.body(node.body, self.body(node.condition, states))
            done += [after for after in turned if after.flow != "on"]
            states = [after for after in turned if after.flow == "on"]
        self._turns //= len(values)
        left = [
            attrs.evolve(after, flow="on") if after.flow == "broken" else after for after in done
        ]
        return [attrs.evolve(after, status=None) for after in [*states, *left]]

    def _branches(self, node: Branches, state: State) -> list[State]:
        if node.subject is not None:
            return self._case(node, self.record.expander.expand(node.subject, state), state)
        waiting, done = [state], list[State]()
        for choice in node.choices:
            tested = self.body(choice.condition, waiting)
            done += [after for after in tested if after.flow != "on"]
            going = [after for after in tested if after.flow == "on"]
            taken = [after for after in going if after.status is not False]
            done += self.body(choice.body, taken)
            waiting = [after for after in going if after.status is not True]
        done += self.body(node.otherwise, waiting)
        return done

    def _case(self, node: Branches, subject: Value, state: State) -> list[State]:
        done, waiting = list[State](), [state]
        for choice in node.choices:
            expand = self.record.expander.expand
            verdict = matches(subject, [expand(pattern, state) for pattern in choice.patterns])
            if verdict is False:
                continue
            after = self.body(choice.body, waiting)
            if choice.goes_on:
                waiting = [*after, *(() if verdict else waiting)]
                continue
            done += after
            if verdict is True:
                return done
        return [*done, *waiting]

    # -- commands -----------------------------------------------------------------------------

    def _command(self, command: Command, state: State) -> list[State]:
        own = state = self._builtins.assign_defaults(command, state)
        if not command.words:
            return [self._assignments(command.assignments, state)]
        for assignment in command.assignments:
            own = self._builtins.assign(own, assignment, exported=True)
        argv = self.record.expander.fields(command.words, own)
        first = argv[0].marked if argv else ""
        argv = unwrapped(argv)
        ended = first == "exec" and argv[:1] != [] and argv[0].marked != "exec"
        name = argv[0].marked if argv else ""
        if name in self._functions and name not in self._active:
            return self._call(name, tuple(argv[1:]), [own])
        changed = bool(command.assignments)
        if argv and base_name(argv[0]) == "env":
            environment = env_command(argv[1:])
            changed, own = self._builtins.env(environment, own, changed=changed)
            argv = unwrapped(list(environment.command))
        else:
            after = self._builtins.run(command, argv, state)
            if after is not None:
                return [after]
            if name == "eval":
                return self._evaluate(argv, own, command.line)
        after = attrs.evolve(state, flow="ended" if ended else state.flow, status=None)
        if self._nested(command, argv, own, always=changed or ended):
            return [after]
        if not self._job(argv, own, command.line) and (changed or ended):
            self.record.launch(own, command.line)
        return [after]

    def _assignments(self, assignments: tuple[Assignment, ...], state: State) -> State:
        for assignment in assignments:
            visible = state.export_all or assignment.name in state.exported
            state = self._builtins.assign(state, assignment, exported=visible)
        return attrs.evolve(state, status=True)

    def _call(self, name: str, arguments: tuple[Value, ...], states: list[State]) -> list[State]:
        """A function's body; its arguments take the place of those of the caller."""
        self._called.add(name)
        self._active.append(name)
        bound = {str(number): value for number, value in enumerate(arguments, start=1)}
        inside = [
            attrs.evolve(state, variables={**_named(state.variables), **bound}) for state in states
        ]
        after = self.body(self._functions[name].body, inside)
        self._active.pop()
        outer = {key: value for key, value in states[0].variables.items() if key.isdecimal()}
        return [
            attrs.evolve(
                state,
                variables={**_named(state.variables), **outer},
                flow="on" if state.flow == "returned" else state.flow,
            )
            for state in after
        ]

    def _evaluate(self, argv: list[Value], state: State, line: int) -> list[State]:
        """`eval TEXT`, in this shell."""
        text = " ".join(value.marked for value in argv[1:])
        nodes = self._parsed(text, argv[1].line or line) if len(argv) > 1 else ()
        if nodes is None:
            self.record.unseen(line, "evaluates text")
            return [attrs.evolve(state, status=None)]
        self._depth += 1
        after = self.body(nodes, [state])
        self._depth -= 1
        return after

    def _nested(self, command: Command, argv: list[Value], state: State, *, always: bool) -> bool:
        """A shell with a text of its own: `bash -c TEXT`, or `bash <<END`."""
        if not argv or base_name(argv[0]) not in SHELLS:
            return False
        text = script_argument(argv)
        if text is None and command.stdin is not None:
            text = self.record.expander.expand(command.stdin, state)
        if text is None:
            files = [value.marked for value in argv[1:] if value.marked.endswith(".sh")]
            if files:
                self.record.unseen(command.line, f"runs {files[0]}".replace(UNKNOWN, "..."))
            return False
        nodes = self._parsed(text.marked, text.line or command.line)
        if nodes is None:
            self.record.unseen(command.line, "runs text")
            return False
        self._depth += 1
        inside = attrs.evolve(state, arrays={})
        self._subshell(nodes, [inside], command.line, always=always)
        self._depth -= 1
        return True

    def _parsed(self, text: str, line: int) -> tuple[Node, ...] | None:
        """The structure of a text inside the script; None when too little of it is known."""
        if self._depth == _MAX_DEPTH or not text.strip(UNKNOWN + " \n"):
            return None
        try:
            return parse_shell(text, line)
        except ScriptError:
            if UNKNOWN in text:
                return None
            raise

    def _job(self, argv: list[Value], state: State, line: int) -> bool:
        """A command whose arguments hold environment variables for other processes."""
        given = job_variables(argv, line)
        whole = given is None
        if given is None:
            given = override_variables(argv, line)
        for name, value in given.items():
            self.record.setting(name, value, value.line or line)
        if given:
            self.record.launch_environ({**(state.environ() if whole else {}), **given}, line)
        return bool(given) or not whole


def _named(variables: Mapping[str, Value]) -> dict[str, Value]:
    """Variables without the arguments `$1`, `$2`, ..."""
    return {name: value for name, value in variables.items() if not name.isdecimal()}


def _last_line(node: Node) -> int:
    match node:
        case Command():
            return node.line
        case Block() | Loop() | Function() if node.body:
            return _last_line(node.body[-1])
        case _:
            return 1
