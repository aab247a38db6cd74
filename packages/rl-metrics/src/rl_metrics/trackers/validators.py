"""What trackers' settings must look like, with the reason in the message."""

from urllib.parse import urlsplit

import attrs


def filled_validator(instance: object, attribute: "attrs.Attribute[str]", value: str) -> None:
    """Refuse an empty name."""
    if not value.strip():
        raise ValueError(f"{type(instance).__name__}: expected a name for {attribute.name}, got ''")


def address_validator(instance: object, attribute: "attrs.Attribute[str]", value: str) -> None:
    """Refuse what is no address, and one that carries a password: configurations are written down.

    The value itself stays out of the message if it may hold a password.
    """
    where = f"{type(instance).__name__}.{attribute.name}"
    parts = urlsplit(value)
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            f"{where}: expected an address without user or password, since configurations are "
            "written down; give those by the tracker's own environment variables"
        )
    if not parts.scheme:
        raise ValueError(
            f"{where}: expected an address with its scheme, such as http://127.0.0.1:5000 or "
            f"file:///data/runs, got {value!r}"
        )
