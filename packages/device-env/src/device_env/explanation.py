"""Everything known about one variable, as text."""

import textwrap
from typing import get_args

from device_env.domains import describe
from device_env.known_names import NamesOf, known_names, known_versions
from device_env.registry import Registry, Variable
from device_env.rules import RULES

_UNKNOWN = "unknown"
_WIDTH = 96
_LABEL = 14


def explain(name: str, *, registry: Registry | None = None) -> str:
    """Describe a variable for people; what is unknown is said to be unknown.

    Raises:
        UnknownVariableError: with the names that look like it.
    """
    registry = Registry.load() if registry is None else registry
    if name not in registry and (readers := _readers_beyond(name)):
        return f"{name}\n  read by       {'; '.join(readers)}\n  all else      {_UNKNOWN}"
    variable = registry.lookup(name)
    default = variable.default if variable.default != "" else "(empty)"
    if variable.default_note is not None:
        default = f"{default} ({variable.default_note})" if default else variable.default_note
    rows = [
        ("owner", variable.component),
        ("meaning", variable.meaning or _UNKNOWN),
        ("values", _UNKNOWN if variable.domain is None else describe(variable.domain)),
        ("default", default or _UNKNOWN),
        ("read by", _readers(variable)),
        ("not read by", _unread(variable)),
        ("set before", variable.set_before or _UNKNOWN),
        ("set by", variable.set_by or _UNKNOWN),
        ("instead", variable.replacement),
        ("elsewhere", variable.counterpart),
        ("notes", variable.notes),
        *(("rule", f"{rule.text} [{rule.source}]") for rule in RULES if name in rule.variables),
        ("source", "; ".join(filter(None, (variable.source, variable.set_source)))),
    ]
    lines = [variable.name]
    for label, text in rows:
        if text is not None:
            lines += textwrap.wrap(
                text,
                _WIDTH,
                initial_indent=f"  {label:<{_LABEL}}",
                subsequent_indent=" " * (_LABEL + 2),
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def _readers_beyond(name: str) -> list[str]:
    """Wheels that read a variable of which nothing else is known."""
    readers: list[str] = []
    for distribution in get_args(NamesOf):
        found = [
            version
            for version in known_versions(distribution)
            if name in (known_names(distribution, version) or ())
        ]
        if found:
            readers.append(f"{distribution} {', '.join(found)}")
    return readers


def _readers(variable: Variable) -> str:
    if variable.never_read:
        return "nobody"
    first, last = variable.first_read, variable.last_read
    if first is None and last is None:
        known = "no version known to read it" if variable.unread else "which versions is unknown"
        return f"{variable.reader}; {known}"
    if first is None:
        span = f"up to {last}, since when is unknown"
    elif last is None:
        span = f"from {first}, until when is unknown"
    else:
        span = f"{first}" if first == last else f"{first} to {last}"
    aged = "" if variable.deprecated_in is None else f", deprecated since {variable.deprecated_in}"
    return f"{variable.reader} {span}{aged}"


def _unread(variable: Variable) -> str | None:
    if not variable.unread:
        return None
    return f"{variable.reader} " + " and ".join(str(bound) for bound in variable.unread)
