r"""Reading the last number of a text, if it stands alone.

The last digits of ``\frac{1}{3}``, ``2^3``, ``1e3`` or ``3:45`` are a part of another number. Read
by themselves they would reward a wrong answer, and a policy finds that. So what is doubtful is
refused: a number that is refused costs a reward once, one that is misread teaches the misreading.
"""

import re
from decimal import Decimal
from typing import Final, Literal

NOT_PLAIN: Final = "not_a_plain_number"
NO_NUMBER: Final = "no_number"

_NUMBER = re.compile(
    r"""
    (?P<sign> (?<![0-9A-Za-z)\]}]) [-\u2212+] )?
    (?P<digits>
        (?: [1-9][0-9]{0,2} (?: ,[0-9]{3} )+ (?![0-9]) | [0-9]+ ) (?: \.[0-9]+ )?
        | (?<!\.) \.[0-9]+
    )
    """,
    re.VERBOSE,
)
"""A decimal number, whatever it is joined to. ``\\u2212`` is the typographic minus."""

_JOINED_BEFORE = re.compile(
    r"""
    (?: [0-9A-Za-z}]                                    # 1.2.3, x2, 1e3, \frac12, \frac{1}3
      | [0-9.][eE][-+\u2212]                            # 1e-3
      | [0-9] (?: [,:] | [ ]:[ ] | \\[,:;!]? [ ]? | [\u00a0\u2009\u202f] )  # 1,23  3:45  1\,234
      | [/\u2044\u2215\u00f7^] [\s$\\]*                 # 1/3, 2^3
      | [0-9A-Za-z)\]}] _+                              # x_2
      | [0-9A-Za-z)\]}] \*\* | [0-9)\]}] \s \*\* \s     # 2**3, but **12** is bold
      | \\ (?: [dtc]?frac | sqrt | binom ) \s? (?: [^\s{}\\] \s? )?         # \frac 1 3
      | \\ (?: over | div ) \s?
      | [-\u2212] \\? [$\u20ac\u00a3\u00a5]             # -$5
      | = \s? [-\u2212] \s                              # = - 5
      | (?<![0-9A-Za-z)\]}]) [\u2010-\u2015\u207b\ufe63\uff0d]    # a dash in the minus' place
    ) \Z
    """,
    re.VERBOSE,
)

_JOINED_BEHIND = re.compile(
    r"""
      [A-Za-z]                                          # 2x, 12k, 3rd
    | \s? [/\u2044\u2215\u00f7]                         # 3/x
    | \s? \^ (?! \s? \{? \s? \\circ )                   # 3^x, but 12^\circ is a unit
    | _+ [0-9A-Za-z{(]
    | \s? \\ (?: pi | [dtc]?frac | sqrt | cdot | times | div | over | choose ) (?![A-Za-z])  # 2\pi
    """,
    re.VERBOSE,
)
_POWER_BEHIND = re.compile(r"\s?\*\*\s?[0-9A-Za-z(]")

_GROUP = re.compile(r"[(\[{]|[)\]}]")
_GROUP_NAME = re.compile(r"(\\?[A-Za-z]+)\s?\Z")
_PLAIN_GROUPS = frozenset(
    {"boxed", "fbox", "text", "textbf", "textit", "mathrm", "mathbf", "mbox", "emph", "left"}
)
"""What may stand before a bracket without changing the number in it."""

_GROUP_JOINED = re.compile(
    r"""
    (?: [0-9A-Za-z] (?: \^ | _ | \*\* )?                # f(2), \frac1{3}
      | [/\u2044\u2215\u00f7^_] [\s$\\]*                # 10^{-3}, 1/(3)
      | [}\]] \s?                                       # \frac{1}{3}, \sqrt[3]{8}
      | [-\u2212]                                       # -(3)
      | \) (?: \*\* )?
    ) \Z
    """,
    re.VERBOSE,
)

_WINDOW = 64
"""Characters around a number that decide whether it is joined; white space counts as one."""


def plain_number(text: str) -> Decimal | None:
    """The number that the whole text is, or None."""
    match = _NUMBER.fullmatch(text.strip())
    return None if match is None else _decimal(match)


def last_number(text: str) -> Decimal | Literal["no_number", "not_a_plain_number"]:
    """The last number of the text, or why there is none; `LastNumber` says what counts as one."""
    text = re.sub(r"\s+", lambda space: space[0][0], text)  # 1/      3 is 1/ 3
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    if last is None:
        return NO_NUMBER
    return _decimal(last) if _stands_alone(text, last.start(), last.end()) else NOT_PLAIN


def _stands_alone(text: str, start: int, end: int) -> bool:
    before = text[max(0, start - _WINDOW) : start]
    behind = text[end : end + _WINDOW]
    if _JOINED_BEFORE.search(before) or _JOINED_BEHIND.match(behind):
        return False
    if _POWER_BEHIND.match(behind) and not before.endswith("**"):
        return False
    # halves, raised digits, and words for ten thousand in other scripts
    if before[-1:].isnumeric() or behind[:1].isnumeric():
        return False
    open_groups: list[int] = []
    for group in _GROUP.finditer(text, 0, start):
        if group[0] in "([{":
            open_groups.append(group.start())
        elif open_groups:
            open_groups.pop()
    return not any(_changes_content(text, place) for place in open_groups)


def _changes_content(text: str, place: int) -> bool:
    """Whether what opens here is an argument, an exponent, an index or the like."""
    before = text[max(0, place - _WINDOW) : place]
    name = _GROUP_NAME.search(before)
    # "is (12)" is prose; \sqrt {2} is a command's argument in spite of the space
    if name and (name[0] == name[1] or (name[1].startswith("\\") and text[place] == "{")):
        return name[1].removeprefix("\\") not in _PLAIN_GROUPS
    joined = _GROUP_JOINED.search(before)
    # "f(1) (2)" and "[1] [2]" are prose; two arguments of a command may have a space between
    return joined is not None and not (text[place] != "{" and joined[0].endswith(" "))


def _decimal(match: "re.Match[str]") -> Decimal:
    # Decimal, unlike int, has no limit of digits and no superlinear conversion
    number = Decimal(match["digits"].replace(",", ""))
    # the minus operator would round to the context's 28 digits
    return number.copy_negate() if match["sign"] in {"-", "\u2212"} else number
