r"""One way of writing for what is written in many: spaces, sizes, fractions, money, units."""

import re
from typing import NamedTuple

_REPLACED: tuple[tuple[str, str], ...] = (
    (r"\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr)(?![A-Za-z])", ""),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\(?:!|;|:|>|quad|qquad|displaystyle|textstyle|limits)(?![A-Za-z])", " "),
    (r"(?<=[0-9])(?:\{,\}|\\,|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", ","),
    (r"\\[, ]|~|[\u00a0\u2009\u202f]", " "),
    (r"\\\$|\$|\\\(|\\\)|\\\[|\\\]", ""),
    (r"[\u2212\u2010-\u2013]", "-"),
    (r"\\(?:%|percent)", "%"),
    (r"\\(?:le|leq|leqslant)(?![A-Za-z])", r"\\le"),
    (r"\\(?:ge|geq|geqslant)(?![A-Za-z])", r"\\ge"),
    (r"\\(?:lt)(?![A-Za-z])", "<"),
    (r"\\(?:gt)(?![A-Za-z])", ">"),
    (r"\\frac\s+", r"\\frac"),
    (r"\s+", " "),
)
_COMPILED = tuple((re.compile(pattern), by) for pattern, by in _REPLACED)

_UNIT = re.compile(
    r"(?P<value>.*?[0-9})\]])\s*(?P<unit>"
    r"(?:\\(?:text|mathrm|textrm|mbox)\{[^{}]*\}(?:\^\{?-?[0-9]\}?)?\s*)+"
    r"|\^\{?\s*\\circ\s*\}?|\\degree|\u00b0)\s*"
)
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|emph)\{\s*([^{}]*?)\s*\}")
_CHOICE = re.compile(r"\(?([A-Za-z])\)?[.:]?")


class Answer(NamedTuple):
    """A written answer, taken apart."""

    text: str
    """Without unit and percent sign."""

    unit: str
    """Words behind the number, or nothing."""

    percent: bool
    """Whether a percent sign stood behind it."""


def normalised_answer(text: str) -> str:
    """The same answer with one way of writing spaces, fractions, signs and thousands."""
    text = text.strip()
    for pattern, by in _COMPILED:
        text = pattern.sub(by, text)
    text = text.strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    return text


def taken_apart(text: str) -> Answer:
    """The normalised answer with its unit and percent sign set apart."""
    text = normalised_answer(text)
    unit = ""
    match = _UNIT.fullmatch(text)
    if match and not _is_list_word(match["unit"]):
        unit = re.sub(r"\\[a-z]+|[{}\s]", "", match["unit"]).rstrip(".")
        text = match["value"].strip()
    percent = text.endswith("%")
    if percent:
        text = text[:-1].strip()
    return Answer(text=text, unit=unit, percent=percent)


def choice_or_words(text: str) -> str | None:
    r"""The letter of ``\textbf{(A)}``, the words of ``\text{Yes}``, or None for anything else."""
    unwrapped = text
    match = _WRAPPED.fullmatch(unwrapped)
    if match:
        unwrapped = match[1]
    choice = _CHOICE.fullmatch(unwrapped)
    if choice:
        return choice[1]
    if match and re.fullmatch(r"[A-Za-z][A-Za-z \-']*", unwrapped):
        return unwrapped.casefold()
    return None


def _is_list_word(unit: str) -> bool:
    return re.sub(r"\\[a-z]+|[{}\s]", "", unit).casefold() in {"and", "or"}
