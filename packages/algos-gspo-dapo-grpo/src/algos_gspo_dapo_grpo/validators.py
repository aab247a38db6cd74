"""Bounds of clip settings, with the reason in the message."""

import math


def clip_low_validator(instance: object, _: object, value: float) -> None:
    """Refuse a lower clip that is not in (0, 1): ratios are positive, so 1 and above never act."""
    if not 0.0 < value < 1.0:
        raise ValueError(
            f"{type(instance).__name__}: expected clip_low between 0 and 1, both excluded, got "
            f"{value}: a ratio is never below 0, so a lower clip of 1 or more could not act"
        )


def dual_clip_validator(instance: object, _: object, value: float | None) -> None:
    """Refuse a dual clip of 1 or less, which would cut losses of unchanged tokens."""
    if value is not None and not 1.0 < value < math.inf:
        raise ValueError(
            f"{type(instance).__name__}: expected dual_clip above 1, got {value}: it would bound "
            "the loss where the ratio is still 1; use None for no dual clip"
        )


def optional_clip_low_validator(instance: object, attribute: object, value: float | None) -> None:
    """As `clip_low_validator`; None is no lower clip."""
    if value is not None:
        clip_low_validator(instance, attribute, value)
