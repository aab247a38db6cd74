"""Bounds of settings, with the reason in the message."""

import math

import attrs

from algos_gspo_dapo_grpo.surrogate import LOG_RATIO_CAP


def positive_validator(instance: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    """Refuse what is not above 0 and finite: infinity and NaN turn a formula into 0 or NaN."""
    if not 0.0 < value < math.inf:
        raise ValueError(
            f"{type(instance).__name__}: expected {attribute.name} above 0 and finite, got {value}"
        )


def clip_low_validator(instance: object, _: object, value: float) -> None:
    """Refuse a lower clip that is not in (0, 1): ratios are positive, so 1 and above never act."""
    if not 0.0 < value < 1.0:
        raise ValueError(
            f"{type(instance).__name__}: expected clip_low between 0 and 1, both excluded, got "
            f"{value}: a ratio is never below 0, so a lower clip of 1 or more could not act"
        )


def clip_high_validator(instance: object, _: object, value: float) -> None:
    """Refuse an upper clip that no ratio reaches, since log ratios are held."""
    highest = math.expm1(LOG_RATIO_CAP)
    if not 0.0 < value < highest:
        raise ValueError(
            f"{type(instance).__name__}: expected clip_high above 0 and below {highest:.3g}, got "
            f"{value}: log ratios are held at {LOG_RATIO_CAP:g}, so a higher clip could not act"
        )


def dual_clip_validator(instance: object, _: object, value: float | None) -> None:
    """Refuse a dual clip that would cut losses of unchanged tokens, or that no ratio reaches."""
    highest = math.exp(LOG_RATIO_CAP)
    if value is not None and not 1.0 < value < highest:
        raise ValueError(
            f"{type(instance).__name__}: expected dual_clip above 1 and below {highest:.3g}, got "
            f"{value}: up to 1 it would bound the loss where the ratio is still 1, and log ratios "
            f"are held at {LOG_RATIO_CAP:g}; use None for no dual clip"
        )


def optional_clip_low_validator(instance: object, attribute: object, value: float | None) -> None:
    """As `clip_low_validator`; None is no lower clip."""
    if value is not None:
        clip_low_validator(instance, attribute, value)
