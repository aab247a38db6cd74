"""The environment variables that matter, with who reads them in which version.

The facts are data (`data/*.json`), each with its source. Unknown is written as null and
said to be unknown; nothing between two versions that were looked at is interpolated except
that a variable found in both is taken to be in those between.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Literal, final

import attrs
from packaging.version import Version

from device_env.domains import Choice, Domain, Flag, Integer, IntegerList, Text
from device_env.errors import UnknownVariableError

Reading = Literal["read", "not read", "unknown"]
"""Whether a version of the reader looks at the variable."""


@final
@attrs.frozen(kw_only=True)
class Bound:
    """A range of versions that ends or begins at one version."""

    operator: Literal["<", "<=", ">", ">="]
    version: Version

    def holds(self, version: Version) -> bool:
        """Whether a version lies in the range; a local part such as `+cpu` does not count."""
        public = Version(version.public)
        match self.operator:
            case "<":
                return public < self.version
            case "<=":
                return public <= self.version
            case ">":
                return public > self.version
            case ">=":
                return public >= self.version

    def __str__(self) -> str:
        return f"{self.operator} {self.version}"


@final
@attrs.frozen(kw_only=True)
class Variable:
    """One environment variable and what is known about it. None always means unknown."""

    name: str
    """The variable."""

    component: str
    """Who owns it, for people."""

    meaning: str | None
    """What it changes."""

    domain: Domain | None
    """Valid values."""

    default: str | None
    """What its reader takes when it is unset."""

    default_note: str | None
    """When the default holds, or what it depends on."""

    reader: str | None
    """Distribution or product whose version decides whether it is read; None if nobody does."""

    first_read: Version | None
    """First version known to read it."""

    last_read: Version | None
    """Last version known to read it."""

    unread: tuple[Bound, ...]
    """Ranges of versions known not to read it."""

    never_read: bool
    """True when no version of any known reader has it."""

    deprecated_in: Version | None
    """First version known to warn that it will go."""

    replacement: str | None
    """What does the same job where it is not read."""

    counterpart: str | None
    """What does the same job on other devices."""

    notes: str | None
    """What else is worth knowing."""

    set_before: str | None
    """The last moment at which setting it still has an effect."""

    set_by: str | None
    """Who must set it for every reader to see it."""

    set_source: str | None
    """Where these two facts are from."""

    source: str
    """Where the other facts are from."""

    @property
    def removed_in(self) -> Bound | None:
        """The range of versions from which on it is known not to be read."""
        return next((bound for bound in self.unread if bound.operator in {">", ">="}), None)

    def reading(self, version: Version) -> Reading:
        """Whether this version of the reader looks at the variable."""
        if self.never_read or any(bound.holds(version) for bound in self.unread):
            return "not read"
        public = Version(version.public)
        first, last = self.first_read, self.last_read
        if public in {first, last}:
            return "read"
        if first is None or last is None:
            return "unknown"
        return "read" if first <= public <= last else "unknown"


@final
@attrs.frozen
class Registry:
    """Every variable that is known, by name."""

    _variables: Mapping[str, Variable]

    @classmethod
    def load(cls) -> "Registry":
        """Read the data files that ship with this package."""
        variables: dict[str, Variable] = {}
        folder = resources.files("device_env").joinpath("data")
        for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if not file.name.endswith(".json"):
                continue
            for entry in json.loads(file.read_text(encoding="utf-8"))["variables"]:
                variable = _variable(entry)
                if variable.name in variables:
                    raise ValueError(f"{file.name}: {variable.name} is in the registry twice")
                variables[variable.name] = variable
        return cls(variables)

    def lookup(self, name: str) -> Variable:
        """The variable of this name.

        Raises:
            UnknownVariableError: with the names that look like it.
        """
        if name in self._variables:
            return self._variables[name]
        near = difflib.get_close_matches(name.upper(), self._variables, n=3, cutoff=0.8)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UnknownVariableError(f"the registry knows no variable {name!r}{hint}")

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    def __iter__(self) -> Iterator[Variable]:
        return iter(self._variables.values())

    def __len__(self) -> int:
        return len(self._variables)


def _variable(entry: Mapping[str, object]) -> Variable:
    fields = dict(entry)
    for name in ("first_read", "last_read", "deprecated_in"):
        fields[name] = None if fields[name] is None else Version(str(fields[name]))
    unread = fields["unread"]
    if not isinstance(unread, list):
        raise TypeError(f"{fields['name']}: expected a list in 'unread', got {unread!r}")
    fields["unread"] = tuple(_bound(str(text)) for text in unread)
    fields["domain"] = _domain(fields["domain"])
    return Variable(**fields)  # type: ignore[arg-type]  # the data is checked by test_registry


def _bound(text: str) -> Bound:
    for operator in ("<=", ">=", "<", ">"):
        if text.startswith(operator):
            return Bound(operator=operator, version=Version(text.removeprefix(operator)))
    raise ValueError(f"expected <, <=, > or >= and a version, got {text!r}")


def _domain(entry: object) -> Domain | None:
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise TypeError(f"expected a domain as an object or null, got {entry!r}")
    fields = {str(key): value for key, value in entry.items() if key != "type"}
    match entry["type"]:
        case "flag":
            return Flag(**fields)
        case "choice":
            return Choice(**(fields | {"values": tuple(fields["values"])}))
        case "integer":
            return Integer(**fields)
        case "integers":
            return IntegerList(**fields)
        case "text":
            return Text(**fields)
        case other:
            raise ValueError(
                f"expected flag, choice, integer, integers or text as type, got {other!r}"
            )
