r"""Reading a written answer as an exact fraction, if it is nothing but a number.

Most answers of the usual data sets are: ``1{,}234``, ``-\frac12``, ``1 1/4``, ``0.\overline{3}``,
``6.02\times 10^{23}``. They are compared here, without a computer algebra system, in microseconds.
What is not wholly read is not guessed at: the caller then asks one.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

_MAX_EXPONENT = 10_000
"""Powers of ten beyond this are left to the caller: they would fill memory."""

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"

_SPACE_BESIDE_A_SIGN = re.compile(r"(?<![0-9]) | (?![0-9])")
"""A space between two digits separates two numbers."""

_SCIENTIFIC = re.compile(
    rf"(?P<digits>[-+]?{_DECIMAL})(?:(?:\\times|\\cdot|\*)10\^(?:\{{(?P<braced>[-+]?[0-9]+)\}}"
    r"|(?P<digit>[-+]?[0-9]))|[eE](?P<e>[-+]?[0-9]+))"
)
_PLAIN = re.compile(rf"[-+]?{_DECIMAL}")
_REPEATING = re.compile(
    rf"(?P<sign>[-+]?)(?P<whole>{_INTEGER})\.(?P<head>[0-9]*)\\overline\{{(?P<tail>[0-9]+)\}}"
)
_SLASH = re.compile(rf"(?P<top>[-+]?{_DECIMAL})/(?P<bottom>[-+]?{_DECIMAL})")
_FRAC = re.compile(
    r"(?P<sign>[-+]?)\\frac(?:\{(?P<top>[^{}]+)\}|(?P<top_digit>[0-9]))"
    r"(?:\{(?P<bottom>[^{}]+)\}|(?P<bottom_digit>[0-9]))"
)
_MIXED = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>[0-9]+)(?: |(?=\\frac))"
    r"(?:(?P<top>[0-9]+)/(?P<bottom>[0-9]+)"
    r"|\\frac(?:\{(?P<ftop>[0-9]+)\}|(?P<ftop_digit>[0-9]))"
    r"(?:\{(?P<fbottom>[0-9]+)\}|(?P<fbottom_digit>[0-9])))"
)


def exact_number(text: str) -> Fraction | None:
    """The number that a normalised text is, exactly, or None if it is anything else.

    Args:
        text: as `normalised_answer` leaves it: no ``$``, one kind of fraction, no sizing commands.
    """
    joined = _SPACE_BESIDE_A_SIGN.sub("", text)
    for pattern, read in _READERS:
        match = pattern.fullmatch(text if pattern is _MIXED else joined)
        if match:
            return read(match)
    return None


def _mixed(match: "re.Match[str]") -> Fraction | None:
    top = int(_one_of(match, "top", "ftop", "ftop_digit"))
    bottom = int(_one_of(match, "bottom", "fbottom", "fbottom_digit"))
    if not 0 < top < bottom:
        return None  # "4 10/3" is no mixed number; nobody knows what it is
    return _signed(match, int(match["whole"]) + Fraction(top, bottom))


def _scientific(match: "re.Match[str]") -> Fraction | None:
    exponent = int(_one_of(match, "braced", "digit", "e"))
    if abs(exponent) > _MAX_EXPONENT:
        return None
    return _plain(match["digits"]) * Fraction(10) ** exponent


def _repeating(match: "re.Match[str]") -> Fraction:
    head, tail = match["head"], match["tail"]
    period = Fraction(int(tail), (10 ** len(tail) - 1) * 10 ** len(head))
    return _signed(match, _plain(f"{match['whole']}.{head}") + period)


def _slash(match: "re.Match[str]") -> Fraction | None:
    return _ratio(match["top"], match["bottom"])


def _frac(match: "re.Match[str]") -> Fraction | None:
    top, bottom = _one_of(match, "top", "top_digit"), _one_of(match, "bottom", "bottom_digit")
    if not _PLAIN.fullmatch(top) or not _PLAIN.fullmatch(bottom):
        return None
    ratio = _ratio(top, bottom)
    return None if ratio is None else _signed(match, ratio)


_READERS: tuple[tuple["re.Pattern[str]", Callable[["re.Match[str]"], Fraction | None]], ...] = (
    (_MIXED, _mixed),
    (_PLAIN, lambda match: _plain(match[0])),
    (_SCIENTIFIC, _scientific),
    (_REPEATING, _repeating),
    (_SLASH, _slash),
    (_FRAC, _frac),
)


def _one_of(match: "re.Match[str]", *names: str) -> str:
    return next(value for value in map(match.group, names) if value is not None)


def _plain(text: str) -> Fraction:
    # Decimal, unlike int, has no limit of digits and no superlinear conversion
    return Fraction(Decimal(text.replace(",", "")))


def _signed(match: "re.Match[str]", value: Fraction) -> Fraction:
    return -value if match["sign"] == "-" else value


def _ratio(top: str, bottom: str) -> Fraction | None:
    divisor = _plain(bottom)
    return _plain(top) / divisor if divisor else None
