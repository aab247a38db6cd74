"""What is met on the ways through a script, and the report about it."""

from collections.abc import Mapping
from typing import final

import attrs

from device_env.shell_values import Expander, State, Value


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

    unseen: tuple[tuple[int, str], ...]
    """Lines that run other scripts or unknown text, whose variables are not known here."""

    every_way: bool
    """False when the script has more ways through it than were followed."""


@final
class Record:
    """Collects, on all ways through a script, what is set and started."""

    def __init__(self) -> None:
        self.expander = Expander()
        self.good_exits: list[tuple[State, int]] = []
        self.exported: set[str] = set()
        self.every_way = True
        self._settings: dict[ShellSetting, None] = {}
        self._launches: dict[frozenset[tuple[str, str]], Launch] = {}
        self._plain: dict[str, ShellSetting] = {}
        self._unseen: dict[tuple[int, str], None] = {}

    def setting(self, name: str, value: Value, line: int) -> None:
        """A line puts a variable into an environment."""
        self._settings[ShellSetting(name, value, line)] = None

    def plain(self, name: str, value: Value, line: int) -> None:
        """A line assigns a variable that is not exported there."""
        self._plain.setdefault(name, ShellSetting(name, value, line))

    def launch(self, state: State, line: int) -> None:
        """A process is started with the exported variables."""
        self.launch_environ(state.environ(), line)

    def launch_environ(self, environ: Mapping[str, Value], line: int) -> None:
        """A process is started with these variables."""
        key = frozenset((name, value.marked) for name, value in environ.items())
        self._launches.setdefault(key, Launch(environ, line))

    def unseen(self, line: int, what: str) -> None:
        """A line runs what is not seen."""
        self._unseen[line, what] = None

    def result(self) -> ScriptEnvironment:
        """The report."""
        unexported = (
            setting
            for name, setting in self._plain.items()
            if name not in self.exported and name not in self.expander.used
        )
        return ScriptEnvironment(
            settings=tuple(sorted(self._settings, key=lambda found: (found.line, found.name))),
            launches=tuple(self._launches.values()),
            unexported=tuple(unexported),
            unseen=tuple(self._unseen),
            every_way=self.every_way,
        )
