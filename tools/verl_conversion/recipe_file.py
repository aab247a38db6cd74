"""The settings as TOML, and what the recipe's own checks say of them."""

import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import tomli_w

from rl_contracts import ConfigError, LoadedConfig, effective_toml, load_config
from verl_conversion.overrides import Value
from verl_conversion.sheet import Setting

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_TABLES = ("data", "loop", "engine", "sampler", "run")
_NOT_SET = ("default here",)

if TYPE_CHECKING:
    from recipe import Recipe


def recipe_toml(settings: Mapping[str, Setting], *, heading: str) -> str:
    """The settings as a file, each with what it comes from."""
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    table = ""
    for path in sorted(settings, key=_place):
        setting = settings[path]
        parent, _, name = path.rpartition(".")
        if parent != table:
            lines += ["", f"[{parent}]"]
            table = parent
        lines.append(f"{name} = {_toml(setting.value)}  # {_short(setting.sources)}")
    return "\n".join(lines) + "\n"


def completed(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """The settings with the default of every other one, where a recipe takes them.

    A recipe's ``--config`` lays a file over values of its own: what the launch leaves at nothing,
    such as a KL term, would else be the recipe's.
    """
    try:
        loaded = _loaded(recipe_toml(settings, heading=""))
    except ConfigError:
        return dict(settings)
    added = {
        path: Setting(path=path, value=value, sources=_NOT_SET)
        for path, value in _leaves(tomllib.loads(effective_toml(loaded)), "")
        if not any(path == given or path.startswith(f"{given}.") for given in settings)
    }
    return {**settings, **added}


def _leaves(table: Mapping[str, object], parent: str) -> Iterator[tuple[str, Value]]:
    """Every value under its dotted path."""
    for name, value in table.items():
        path = f"{parent}.{name}" if parent else name
        if isinstance(value, dict) and value:
            yield from _leaves(value, path)
        else:
            yield path, cast("Value", value)


def _toml(value: Value) -> str:
    """A value on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{_toml(key)} = {_toml(inner)}" for key, inner in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def problems_of(text: str) -> list[str]:
    """Why `load_config` would not take this file for a recipe; empty if it does."""
    try:
        _loaded(text)
    except ConfigError as error:
        return [
            f"{problem.path}: {problem.message}" if problem.path else problem.message
            for problem in error.problems
        ]
    return []


def _loaded(text: str) -> "LoadedConfig[Recipe]":
    """The file as a recipe's configuration, on top of no other one."""
    if str(_EXAMPLES) not in sys.path:
        sys.path.insert(0, str(_EXAMPLES))
    from recipe import Recipe  # noqa: PLC0415  # loads torch and Ray

    with tempfile.TemporaryDirectory(prefix="convert-verl-") as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(text, encoding="utf-8")
        return load_config(Recipe, file=file)


def _place(path: str) -> tuple[int, int, str, int, str]:
    """What is in no table, then tables in the order of the recipe, its kind first in each.

    A table stands before those in it.
    """
    parent, _, name = path.rpartition(".")
    table = _TABLES.index(path.partition(".")[0]) if parent else -1
    return table, parent.count("."), parent, int(name != "kind"), ""


def _short(sources: Sequence[str]) -> str:
    """The settings of verl, without the part that all of them have."""
    return ", ".join(dict.fromkeys(source.removeprefix("actor_rollout_ref.") for source in sources))
