"""The floating-point types that a configuration can name."""

from typing import Any, Literal, get_args

import attrs

DType = Literal["float32", "bfloat16"]
"""Names of the types that weights are computed with and exported in."""


def known_dtype(_: object, attribute: "attrs.Attribute[Any]", value: str | None) -> None:
    """Refuse another name than those of `DType`; a validator of an attrs field. None passes.

    Raises:
        ValueError: with the known names.
    """
    if value is not None and value not in get_args(DType):
        known = " or ".join(get_args(DType))
        message = f"{attribute.name}: expected {known}, got {value!r}"
        raise ValueError(message)
