"""Numbers that a configuration can hold and that would switch something off."""

import math
from typing import Any

import attrs


def finite(_: object, attribute: "attrs.Attribute[Any]", value: float | None) -> None:
    """Refuse infinity and nan, which TOML, JSON and YAML can write; a validator. None passes.

    A bound alone lets infinity through: an infinite temperature makes every logit 0.

    Raises:
        ValueError: with the value.
    """
    if value is not None and not math.isfinite(value):
        message = f"{attribute.name}: expected a finite number, got {value}"
        raise ValueError(message)
