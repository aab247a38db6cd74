"""``effective_config.toml`` as one flat table, to be compared and shown."""

import tomllib
from collections.abc import Iterator, Mapping

SettingValue = str | int | float | bool
"""A leaf; a list of plain values or a date is its text."""


def flat_settings(toml: str, *, where: str) -> dict[str, SettingValue]:
    """Every leaf of a TOML document by its dotted path, in the document's order.

    Entries of a list of tables are counted in the path, from 0.

    Args:
        toml: the document; empty is no setting at all.
        where: the file, for the message.

    Raises:
        ValueError: if it is no TOML; names the file.
    """
    try:
        tree = tomllib.loads(toml)
    except tomllib.TOMLDecodeError as error:
        message = f"{where}: expected TOML: {error}"
        raise ValueError(message) from error
    return dict(_leaves(tree, ""))


def _leaves(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, SettingValue]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield from _leaves({str(i): item for i, item in enumerate(value)}, f"{prefix}{name}.")
        elif isinstance(value, str | int | float | bool):
            yield f"{prefix}{name}", value
        else:
            yield f"{prefix}{name}", str(value)
