"""Which settings a release of verl has, with which defaults.

The table, `data/settings.tsv`, holds what hydra composes from the configuration files of verl's
published wheels; the README of the folder says how a release is added.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast, final, get_args

import attrs

from verl_conversion.launches import Program
from verl_conversion.overrides import Value

TABLE = Path(__file__).parent / "data" / "settings.tsv"

Release = Literal["0.7.1", "0.8.0", "0.9.0", "0.9.1"]
"""Releases of verl in the table, oldest first."""

RELEASES: tuple[Release, ...] = get_args(Release)

ModelEngine = Literal["dp", "veomni"]
"""Training engines in the table, by their names in ``model_engine=``."""

VLLM: Mapping[Release, str] = {
    "0.7.1": "0.12.0",
    "0.8.0": "0.12.0",
    "0.9.0": "0.24.0",
    "0.9.1": "0.24.0",
}
"""The vllm that a release is for: the newest that its wheel asks for, and for 0.9.0, which asks for
0.18 or newer, that of verl's lock file of the time."""


@final
@attrs.frozen(kw_only=True)
class Defaults:
    """The settings of one program with one engine."""

    release: Release
    program: Program
    engine: ModelEngine
    values: Mapping[str, Value]
    """By dotted path. An empty table is a value; other tables are not."""

    def has_table(self, path: str) -> bool:
        """Whether settings stand below this path."""
        return any(key.startswith(f"{path}.") for key in self.values) or self.values.get(path) == {}


@functools.cache
def defaults_of(release: Release, program: Program, engine: ModelEngine) -> Defaults:
    """The defaults of a program of verl with an engine."""
    here = {"*", release, f"{release}/{program}/{engine}"}
    values: dict[str, Value] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        key, default, where = line.split("\t")
        if here & set(where.split()):
            values[key] = cast("Value", json.loads(default))
    return Defaults(release=release, program=program, engine=engine, values=values)


@functools.cache
def releases_with(key: str) -> tuple[Release, ...]:
    """The releases that have this setting, with whichever program and engine."""
    found: set[str] = set()
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{key}\t"):
            for word in line.split("\t")[2].split():
                found |= set(RELEASES) if word == "*" else {word.partition("/")[0]}
    return tuple(release for release in RELEASES if release in found)
