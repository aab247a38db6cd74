"""Overrides put on the defaults of a release, as hydra does it: what verl would run with."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import cast, final

import attrs

from verl_conversion.launches import Launch, LaunchError
from verl_conversion.overrides import (
    Override,
    OverrideError,
    UnreadOverrideError,
    Value,
    parse_override,
)
from verl_conversion.releases import (
    Defaults,
    ModelEngine,
    Release,
    defaults_of,
    releases_with,
)

GROUP = "model_engine"
"""The one group of configurations that launch scripts choose."""


@final
@attrs.frozen(kw_only=True)
class Entry:
    """One override, and what hydra makes of it."""

    text: str
    """As it was given."""

    override: Override | None = None
    """Taken apart; None where it is no override or not known in full."""

    refused: str = ""
    """Why hydra would not take it; empty if it does."""

    unknown: str = ""
    """Why it could not be read: the script alone can tell."""

    unread: str = ""
    """Why it could not be read: this tool does not know what hydra makes of it."""

    absent: bool = False
    """Whether the release has no setting of this name."""

    replaced_by: int | None = None
    """Index of a later override of the same key."""

    @property
    def key(self) -> str:
        """The setting's path, as far as it can be told."""
        if self.override is not None:
            return self.override.key
        return self.text.partition("=")[0].lstrip("+~")


@final
@attrs.frozen(kw_only=True)
class Composed:
    """What verl would run with."""

    release: Release
    engine: ModelEngine
    defaults: Defaults
    entries: tuple[Entry, ...]
    """One for each override, in order."""

    values: Mapping[str, Value]
    """Every setting by its path, where an override was taken with its value."""

    unknown: frozenset[str]
    """Settings whose value only running the script could tell."""

    on_npu: bool
    """Whether setting or environment say that it runs on NPUs."""

    @property
    def is_async(self) -> bool:
        """Whether the program is the fully asynchronous one."""
        return self.defaults.program == "fully_async"

    @property
    def set_here(self) -> frozenset[str]:
        """Keys that an override sets."""
        return frozenset(entry.key for entry in self.entries if entry.override is not None)

    def get(self, key: str, default: Value = None) -> Value:
        """A setting's value; `default` where the release has none and no override adds it."""
        return self.values.get(key, default)

    def on(self, key: str) -> bool:
        """Whether a switch is on."""
        return self.get(key) is True

    def number(self, key: str) -> float | None:
        """A setting's value if it is a finite number."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value if abs(value) < math.inf else None

    def count(self, key: str) -> int | None:
        """A setting's value if it is a whole number."""
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def text(self, key: str) -> str | None:
        """A setting's value if it is a text."""
        value = self.get(key)
        return value if isinstance(value, str) else None

    def below(self, path: str) -> dict[str, Value]:
        """The settings under a path, by the rest of theirs."""
        prefix = f"{path}."
        return {
            key.removeprefix(prefix): value
            for key, value in self.values.items()
            if key.startswith(prefix)
        }


def compose(launch: Launch, release: Release) -> Composed:
    """Put the overrides of a launch on the defaults of a release.

    Raises:
        LaunchError: an engine is chosen that the table does not know.
    """
    entries = [_read(argument.text, known=argument.known) for argument in launch.overrides]
    engine = _engine(entries)
    defaults = defaults_of(release, launch.program, engine)
    values = dict(defaults.values)
    unknown: set[str] = set()
    latest: dict[str, int] = {}
    for place, entry in enumerate(entries):
        if entry.key in latest:
            entries[latest[entry.key]] = attrs.evolve(entries[latest[entry.key]], replaced_by=place)
        latest[entry.key] = place
        if entry.unknown:
            unknown.add(entry.key)
            values.pop(entry.key, None)
        elif entry.override is not None and entry.key != GROUP and not is_hydras(entry.key):
            entries[place] = _apply(entry, entry.override, defaults, values)
            unknown.discard(entry.key)
    return Composed(
        release=release,
        engine=engine,
        defaults=defaults,
        entries=tuple(entries),
        values=values,
        unknown=frozenset(unknown),
        on_npu=values.get("trainer.device") == "npu" or any(map(_is_for_npu, launch.environ)),
    )


def is_hydras(key: str) -> bool:
    """Whether a key is one of hydra's own settings, of its folders and logs."""
    return key == "hydra" or key.startswith(("hydra.", "hydra/"))


def _is_for_npu(variable: str) -> bool:
    return variable.startswith(("HCCL_", "ASCEND_", "VLLM_ASCEND_")) or "_NPU_" in variable


def _read(text: str, *, known: bool) -> Entry:
    if not known:
        return Entry(text=text, unknown="its value is known only when the script runs")
    try:
        return Entry(text=text, override=parse_override(text))
    except UnreadOverrideError as error:
        return Entry(text=text, unread=str(error))
    except OverrideError as error:
        return Entry(text=text, refused=str(error))


def _engine(entries: Sequence[Entry]) -> ModelEngine:
    chosen: Value = "dp"
    for entry in entries:
        if entry.key == GROUP and entry.unknown:
            raise LaunchError(f"{entry.text}: which engine trains is known only when it runs")
        if entry.key == GROUP and entry.override is not None:
            chosen = entry.override.value
    if chosen not in ("dp", "veomni"):
        raise LaunchError(
            f"{GROUP}={chosen}: expected dp (FSDP) or veomni, the engines that there is a "
            "counterpart of; other engines' settings are not in the tables of this tool"
        )
    return cast("ModelEngine", chosen)


def _apply(entry: Entry, override: Override, defaults: Defaults, values: dict[str, Value]) -> Entry:
    """What hydra does with one override; `values` is changed."""
    key = override.key
    refused = _refusal(override, defaults, values)
    if refused:
        return attrs.evolve(entry, refused=refused)
    absent = key not in defaults.values and not defaults.has_table(key)
    parent = key.rpartition(".")[0]
    if isinstance(values.get(parent), dict):
        del values[parent]  # it is not empty any more
    if override.operation == "delete" or not isinstance(override.value, dict):
        for name in [name for name in values if name == key or name.startswith(f"{key}.")]:
            del values[name]
    if override.operation != "delete":
        values.update(_leaves(key, override.value))
    return attrs.evolve(entry, absent=absent)


def _refusal(override: Override, defaults: Defaults, values: Mapping[str, Value]) -> str:
    """Why hydra would not take an override; empty if it does."""
    key = override.key
    exists = key in values or any(name.startswith(f"{key}.") for name in values)
    parent = key.rpartition(".")[0]
    match override.operation:
        case "set" | "delete" if not exists:
            how = f": hydra asks for +{key}=..., which adds one that may have no reader"
            known = releases_with(key)
            elsewhere = f" (it is one of verl {', '.join(known)})" if known else ""
            return (
                f"verl {defaults.release} has no setting {key}"
                f"{how if override.operation == 'set' else ''}{elsewhere}"
            )
        case "add" if exists and not isinstance(values.get(key), dict):
            return (
                f"verl {defaults.release} has {key}, and + adds only what is not there yet; write "
                f"{key}=... or ++{key}=..."
            )
        case "add" | "force" if not isinstance(values.get(parent), dict | None):
            return f"{parent} = {values[parent]!r} has no settings below it"
        case _:
            return ""


def _leaves(key: str, value: Value) -> Iterator[tuple[str, Value]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value
