"""What values a variable takes, and what its reader does with any other."""

import re
from typing import Literal, assert_never, final

import attrs

OnInvalid = Literal["raises", "default"] | None
"""`raises`: the reader stops; `default`: it silently takes its default; None: unknown."""


@final
@attrs.frozen(kw_only=True)
class Flag:
    """0 or 1, as read by `parser`."""

    parser: Literal["int", "words", "equals_1"] | None
    """`int`: `bool(int(value))`, other text raises; `words`: only `1` and `true` are true;
    `equals_1`: only `1` is true; None: documented as 0 or 1, the parser is unknown."""


@final
@attrs.frozen(kw_only=True)
class Choice:
    """One of a list of words."""

    values: tuple[str, ...]
    """The words that are documented."""

    complete: bool
    """False when the reader knows more words than are listed here."""

    case_sensitive: bool
    """Whether `info` is the same word as `INFO`."""

    on_invalid: OnInvalid
    """What the reader does with another word."""


@final
@attrs.frozen(kw_only=True)
class Integer:
    """A whole number."""

    minimum: int | None
    """Smallest value; None when unknown or unbounded."""

    maximum: int | None
    """Largest value; None when unknown or unbounded."""

    unit: str | None
    """Unit of the number."""

    on_invalid: OnInvalid
    """What the reader does with text that is no number."""


@final
@attrs.frozen(kw_only=True)
class Text:
    """Free text; the form is described, not checked."""

    form: str
    """What the text should look like."""


@final
@attrs.frozen(kw_only=True)
class IntegerList:
    """Whole numbers with commas between them, or one alone."""

    minimum: int
    """Smallest value of each."""

    on_invalid: OnInvalid
    """What the reader does with any other text."""


Domain = Flag | Choice | Integer | IntegerList | Text

_WORDS = ("0", "1", "true", "false")
_FLAG_REMARKS = {
    "int": " (read with int(): words such as 'true' raise ValueError)",
    "words": " (also 'true' and 'false'; anything else counts as false)",
    "equals_1": " (anything but '1' counts as false)",
    None: "",
}


@final
@attrs.frozen(kw_only=True)
class Violation:
    """A value that the reader does not take as meant."""

    level: Literal["error", "warning"]
    """`error` when the reader is known to stop or to take another value."""

    message: str
    """Expected against got."""

    fix: str
    """A value that works."""


def check_value(domain: Domain, value: str) -> Violation | None:
    """Compare a value with a domain; None when nothing is known against it."""
    match domain:
        case Flag():
            return _check_flag(domain, value)
        case Choice():
            return _check_choice(domain, value)
        case Integer():
            return _check_integer(domain, value)
        case IntegerList():
            return _check_list(domain, value)
        case Text():
            return None
        case _:
            assert_never(domain)


def describe(domain: Domain) -> str:
    """One line for people."""
    match domain:
        case Flag():
            return f"0 or 1{_FLAG_REMARKS[domain.parser]}"
        case Choice():
            return ", ".join(domain.values) + ("" if domain.complete else ", and others")
        case Integer():
            low = "" if domain.minimum is None else f", at least {domain.minimum}"
            high = "" if domain.maximum is None else f", at most {domain.maximum}"
            return "integer" + low + high + ("" if domain.unit is None else f", in {domain.unit}")
        case IntegerList():
            return f"integers of at least {domain.minimum}, with commas between them, or one"
        case Text():
            return domain.form
        case _:
            assert_never(domain)


def _check_flag(domain: Flag, value: str) -> Violation | None:
    match domain.parser:
        case "int":
            fine, consequence = _is_integer(value), ": its reader calls int() and stops on it"
        case "words":
            fine, consequence = value.strip().lower() in _WORDS, ", which counts as false"
        case "equals_1":
            fine, consequence = value in {"0", "1"}, ", which counts as false"
        case None:
            fine, consequence = value in {"0", "1"}, "; how its reader takes that is unknown"
        case _:
            assert_never(domain.parser)
    if fine:
        return None
    return Violation(
        level="warning" if domain.parser is None else "error",
        message=f"expected 0 or 1, got {value!r}{consequence}",
        fix="write 1 for on or 0 for off",
    )


def _check_choice(domain: Choice, value: str) -> Violation | None:
    known = domain.values if domain.case_sensitive else tuple(v.lower() for v in domain.values)
    if (value if domain.case_sensitive else value.lower()) in known:
        return None
    if not domain.complete:
        return _check_spelling(domain, value)
    message = f"expected {', '.join(domain.values)}, got {value!r}{_consequence(domain.on_invalid)}"
    return Violation(
        level="warning" if domain.on_invalid is None else "error",
        message=message,
        fix=f"use one of {', '.join(domain.values)}",
    )


def _check_spelling(domain: Choice, value: str) -> Violation | None:
    """A word that is known, but for its case or for what stands around it."""
    meant = value.strip(" \t\r\n'\"").lower()
    for word in domain.values:
        if word.lower() == meant and domain.on_invalid is not None:
            return Violation(
                level="error",
                message=f"expected {word}, got {value!r}{_consequence(domain.on_invalid)}",
                fix=f"write {word}",
            )
    return None


def _check_list(domain: IntegerList, value: str) -> Violation | None:
    parts = value.split(",")
    if all(_is_integer(part) and int(part) >= domain.minimum for part in parts):
        return None
    return Violation(
        level="warning" if domain.on_invalid is None else "error",
        message=f"expected {describe(domain)}, got {value!r}{_consequence(domain.on_invalid)}",
        fix="write a whole number",
    )


def _check_integer(domain: Integer, value: str) -> Violation | None:
    wanted = describe(domain)
    if not _is_integer(value):
        return Violation(
            level="warning" if domain.on_invalid is None else "error",
            message=f"expected {wanted}, got {value!r}{_consequence(domain.on_invalid)}",
            fix="write a whole number",
        )
    number = int(value)
    too_low = domain.minimum is not None and number < domain.minimum
    too_high = domain.maximum is not None and number > domain.maximum
    if too_low or too_high:
        bound = domain.minimum if too_low else domain.maximum
        message = f"expected {wanted}, got {number}"
        return Violation(level="error", message=message, fix=f"the nearest valid value is {bound}")
    return None


def _consequence(on_invalid: OnInvalid) -> str:
    match on_invalid:
        case "raises":
            return ": its reader stops on it"
        case "default":
            return ": its reader silently takes the default instead"
        case None:
            return "; what its reader does with that is unknown"
        case _:
            assert_never(on_invalid)


def _is_integer(value: str) -> bool:
    return re.fullmatch(r"\s*[+-]?[0-9]+\s*", value) is not None
