"""Values that can be read back from the engine's process and compared."""

from collections.abc import Iterator, Mapping, Sequence

Plain = bool | int | float | str | None
"""What can be read back from the engine's process and compared."""


def flattened(value: object, name: str = "") -> Iterator[tuple[str, Plain]]:
    """Plain values of nested mappings and sequences, under names joined by dots.

    An empty one is itself an entry, and whatever is not plain is given as text.
    """
    if isinstance(value, Mapping) and value:
        entries: Iterator[tuple[str, object]] = ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, Sequence) and value and not isinstance(value, str | bytes):
        entries = ((str(place), inner) for place, inner in enumerate(value))
    else:
        yield name, value if isinstance(value, Plain) else str(value)
        return
    for key, inner in entries:
        yield from flattened(inner, f"{name}.{key}" if name else key)
