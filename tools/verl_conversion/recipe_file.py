"""The settings as TOML, and what the recipe's own checks say of them."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomli_w

from rl_contracts import ConfigError, load_config
from verl_conversion.overrides import Value
from verl_conversion.sheet import Setting

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_TABLES = ("data", "loop", "engine", "sampler", "run")


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


def _toml(value: Value) -> str:
    """A value on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{_toml(key)} = {_toml(inner)}" for key, inner in value.items())
        return f"{{ {inside} }}"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def problems_of(text: str) -> list[str]:
    """Why `load_config` would not take this file for a recipe; empty if it does."""
    if str(_EXAMPLES) not in sys.path:
        sys.path.insert(0, str(_EXAMPLES))
    from recipe import Recipe  # noqa: PLC0415  # loads torch and Ray

    with tempfile.TemporaryDirectory(prefix="convert-verl-") as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(text, encoding="utf-8")
        try:
            load_config(Recipe, file=file)
        except ConfigError as error:
            return [
                f"{problem.path}: {problem.message}" if problem.path else problem.message
                for problem in error.problems
            ]
    return []


def _place(path: str) -> tuple[int, int, str, int, str]:
    """Tables in the order of the recipe, a table before those in it, its kind first."""
    parent, _, name = path.rpartition(".")
    top = path.partition(".")[0]
    return _TABLES.index(top), parent.count("."), parent, int(name != "kind"), ""


def _short(sources: Sequence[str]) -> str:
    """The settings of verl, without the part that all of them have."""
    return ", ".join(dict.fromkeys(source.removeprefix("actor_rollout_ref.") for source in sources))
