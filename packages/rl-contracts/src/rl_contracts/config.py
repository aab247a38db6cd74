"""The strict configuration loader: text in, frozen attrs values out, every value with its origin.

A configuration is an ``attrs.frozen(kw_only=True)`` class whose fields are plain values, further
such classes, tuples, or unions of such classes told apart by ``kind``. It is filled from a file
(TOML, JSON or YAML) and from dotted overrides (``optim.lr=3e-5``), through one cattrs converter
that converts nothing silently: ``4.7`` is not an int, ``"false"`` is not a bool, an unknown key is
an error. All problems are reported at once, each with its path, where it was set, and the nearest
valid name.

``None`` is written ``"none"``, since TOML has no null.
"""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, Literal, TypeVar

import attrs

from rl_contracts.converter import (
    StructureError,
    completed_from,
    make_converter,
    settings_of,
    shown,
)

OriginKind = Literal["default", "file", "command line"]
ConfigT = TypeVar("ConfigT")


@attrs.frozen(kw_only=True)
class Origin:
    """Who set a value."""

    kind: OriginKind
    """`default`: the class itself."""

    detail: str = ""
    """The file's name, or the override as it was typed."""

    def __str__(self) -> str:
        """The origin as one phrase."""
        return f"{self.kind} {self.detail}".strip() if self.kind == "file" else self.kind


@attrs.frozen(kw_only=True)
class Problem:
    """One thing that is wrong with a configuration."""

    path: str
    """Dotted path of the setting; empty for the whole configuration."""

    message: str
    """What was expected and what came."""

    origin: str = ""
    """Where the value was set."""

    def __str__(self) -> str:
        """One line: path, message, origin."""
        where = f"{self.path}: " if self.path else ""
        source = f"  [{self.origin}]" if self.origin else ""
        return f"{where}{self.message}{source}"


class ConfigError(ValueError):
    """A configuration was refused; the message lists every problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        super().__init__(f"{len(self.problems)} {noun} in the configuration:\n{lines}")


@attrs.frozen(kw_only=True)
class LoadedConfig(Generic[ConfigT]):
    """A configuration together with who set each of its values."""

    value: ConfigT
    """The structured configuration."""

    origins: Mapping[str, Origin]
    """Dotted path of every setting that is not at its default."""

    def origin(self, path: str) -> Origin:
        """Who set the value at a dotted path, the table that holds it, or a value below it."""
        above = path
        while above:
            if above in self.origins:
                return self.origins[above]
            above = above.rpartition(".")[0]
        below = (origin for name, origin in self.origins.items() if name.startswith(f"{path}."))
        return next(below, Origin(kind="default"))


def _load_yaml(text: str) -> object:
    # YAML 1.2, where 1e-6 is a number and `no` is a word. An extra, hence imported here.
    from ruamel.yaml import YAML  # noqa: PLC0415
    from ruamel.yaml.error import YAMLError  # noqa: PLC0415

    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ValueError(str(error)) from error


_PARSERS: Mapping[str, Callable[[str], object]] = {
    ".toml": tomllib.loads,
    ".json": json.loads,
    ".yaml": _load_yaml,
    ".yml": _load_yaml,
}


def _refuse(message: str, *, path: str = "", origin: str = "") -> ConfigError:
    return ConfigError([Problem(path=path, message=message, origin=origin)])


def _read_file(path: Path) -> dict[str, object]:
    if path.suffix not in _PARSERS:
        raise _refuse(f"expected a .toml, .json or .yaml file, got {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _refuse(f"cannot read the configuration file {path}: {error.strerror}") from error
    try:
        tree = _PARSERS[path.suffix](text)
    except ValueError as error:  # what the parsers raise for broken text
        raise _refuse(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(tree, dict):
        raise _refuse(f"expected {path} to hold a table of settings, got {shown(tree)}")
    return tree


def parse_override(text: str) -> tuple[str, object]:
    """Split ``path=value``; the value is read as TOML, a bare word as a string.

    Raises:
        ConfigError: if there is no ``=`` or no path.
    """
    path, equals, raw = text.partition("=")
    path = path.strip()
    if not equals or not path or any(not part for part in path.split(".")):
        message = f"expected an override of the form path.to.setting=value, got {text!r}"
        raise _refuse(message, origin="command line")
    try:
        tree = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return path, raw
    # More than one key: the text has lines of its own, and is no single TOML value.
    return path, tree["value"] if len(tree) == 1 else raw


def _place(tree: dict[str, object], path: str, value: object) -> None:
    *parents, leaf = path.split(".")
    table = tree
    for depth, name in enumerate(parents):
        below = table.setdefault(name, {})
        if not isinstance(below, dict):
            at = ".".join(parents[: depth + 1])
            message = f"{at} is set to {below!r} and has no settings below it"
            raise _refuse(message, path=path, origin="command line")
        table = below
    table[leaf] = value


def _begin_afresh(
    tree: Mapping[str, object], origins: dict[str, Origin], path: str, kind: object
) -> None:
    """Forget a file's settings of another kind: they belong to what is no longer chosen."""
    table: object = tree
    for name in path.split("."):
        table = table.get(name) if isinstance(table, dict) else None
    if isinstance(table, dict) and table.get("kind", kind) != kind:
        table.clear()
        for known in [name for name in origins if name.startswith(f"{path}.")]:
            del origins[known]


def _leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path


def _elsewhere(path: str, message: str, root: type) -> str:
    """Name the setting meant by its whole path, or where in the configuration the name exists."""
    parent, _, name = path.rpartition(".")
    if message.startswith("unknown setting of"):
        return message
    near = "unknown setting; did you mean "
    if parent and message.startswith(near):
        return f"{near}{parent}.{message.removeprefix(near)}"
    if message.startswith("unknown setting; known here"):
        found = sorted({s.path for s in settings_of(root) if s.path.rpartition(".")[2] == name})
        if found:
            return f"unknown setting; did you mean {' or '.join(found)}?"
    return message


def load_config(
    config_class: type[ConfigT],
    *,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    defaults: ConfigT | None = None,
) -> LoadedConfig[ConfigT]:
    """Fill a configuration class from a file and from dotted overrides, which win.

    Args:
        config_class: an ``attrs.frozen(kw_only=True)`` class.
        file: a .toml, .json or .yaml file; None for the defaults alone.
        overrides: ``path.to.setting=value``, in order; the value is read as TOML.
        defaults: a configuration whose values stand where neither sets one, such as a recipe's;
            None for the class's own defaults.

    Raises:
        ConfigError: listing every problem with its path and where the value was set.
    """
    tree: dict[str, object] = {} if file is None else _read_file(file)
    origins = {path: Origin(kind="file", detail=str(file)) for path in _leaves(tree)}
    problems: list[Problem] = []
    for text in overrides:
        try:
            path, value = parse_override(text)
            if path.endswith(".kind"):
                _begin_afresh(tree, origins, path.removesuffix(".kind"), value)
            _place(tree, path, value)
        except ConfigError as error:
            problems.extend(error.problems)
        else:
            origins[path] = Origin(kind="command line", detail=text)
    if problems:
        raise ConfigError(problems)
    try:
        given = tree if defaults is None else completed_from(tree, defaults)
        value = make_converter().structure(given, config_class)
    except StructureError as error:
        loaded = LoadedConfig(value=None, origins=origins)
        raise ConfigError(
            [
                Problem(
                    path=path,
                    message=_elsewhere(path, message, config_class),
                    origin="" if (set_by := loaded.origin(path)).kind == "default" else str(set_by),
                )
                for path, message in error.problems
            ]
        ) from error
    return LoadedConfig(value=value, origins=origins)
