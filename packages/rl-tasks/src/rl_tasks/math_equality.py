r"""Whether two written answers are the same mathematical object.

Numbers, also those with square roots and pi, are compared exactly in this process's own arithmetic.
The rest is parsed by math-verify (Kydlicek 2025, Apache-2.0), whose comparison is trusted except
where it is known to be wrong (math-verify 0.9.0):

- it rounds to 6 digits, so that two different tiny numbers are equal: numbers are compared exactly
  here, or with 40 digits where that is not decidable;
- it reads mixed numbers, repeating decimals, ``exp(16)``, ``pi/2`` and ``i^2`` as something else:
  they are rewritten before;
- it ignores the case of a letter, and what stands behind an ellipsis or a colon: such texts are
  compared as text.

It may run for very long or use all memory on a hostile answer; call it in a process of its own.
Nothing that a model wrote is evaluated: of math-verify's readers only that of LaTeX is used, which
is a grammar.
"""

import functools
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from rl_tasks.answer_text import Answer, choice_or_words, taken_apart
from rl_tasks.exact_number import exact_number
from rl_tasks.exact_surd import Surd, exact_surd

if TYPE_CHECKING:
    import sympy

PercentRule = Literal["either", "value"]

_DIGITS = 40
_MAX_BITS = 10_000
"""Of a number that is written out; Python writes no integer of more than 4300 digits."""

_ELLIPSIS = re.compile(r"\\[lcd]?dots|\.\.\.|\u2026")
_CLOCK = re.compile(r"[0-9]\s*:\s*[0-9]")
_CHAIN = re.compile(
    r"(?P<low>[^<>=]+?)\s*(?P<first><|\\le(?![a-z]))\s*[A-Za-z]\s*"
    r"(?P<second><|\\le(?![a-z]))\s*(?P<high>[^<>=]+)"
)
_PLAIN_FUNCTIONS = (
    (re.compile(r"(?<![A-Za-z\\])exp\(([^()]*)\)"), r"e^{\1}"),
    (re.compile(r"(?<![A-Za-z])\\?sqrt\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi"),
    (re.compile(r"(?<![A-Za-z\\])(sin|cos|tan|log|ln)(?=\()"), r"\\\1"),
    (re.compile(r"\\mathrm\{e\}|\\text\{e\}"), "e"),
    (re.compile(r"\+\s*-"), "-"),
    (re.compile(r"\*\*"), "^"),
)
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")


def answers_are_equal(
    answer: str, ground_truth: str, *, percent: PercentRule, needs_algebra: bool
) -> bool | None:
    """Whether two answers are the same.

    Args:
        answer: what a model wrote, without its box.
        ground_truth: what is right.
        percent: what ``50%`` is: ``value`` is a half; ``either`` also 50, since data sets leave
            the sign out of their answers.
        needs_algebra: False does only what needs none, and returns None if that does not decide.
    """
    got, right = taken_apart(answer), taken_apart(ground_truth)
    if got == right:
        return True
    if got.unit and right.unit and got.unit != right.unit:
        return False
    decided = _by_text(got, right, percent)
    if decided is not None or not needs_algebra:
        return decided
    return _by_algebra(got.text, right.text)


def load_algebra() -> None:
    """Import what the first comparison would import."""
    import math_verify  # noqa: F401, PLC0415
    import sympy  # noqa: F401, PLC0415


def _by_text(got: Answer, right: Answer, percent: PercentRule) -> bool | None:
    """What text and exact numbers decide, or None."""
    numbers = exact_number(got.text), exact_number(right.text)
    if numbers[0] is not None and numbers[1] is not None:
        return _numbers_equal(numbers[0], numbers[1], got, right, percent)
    if got.text == right.text:
        return got.percent == right.percent
    words = choice_or_words(got.text), choice_or_words(right.text)
    if words[0] is not None and words[1] is not None:
        return words[0] == words[1]
    if any(as_text.search(a.text) for as_text in (_ELLIPSIS, _CLOCK) for a in (got, right)):
        return re.sub(r"\s", "", got.text) == re.sub(r"\s", "", right.text)
    return None if got.percent or right.percent else _surds_equal(got.text, right.text)


def _surds_equal(got: str, right: str) -> bool | None:
    """Whether two numbers made of fractions, roots and pi are equal, or None for anything else."""
    number = _surd(right)  # first: what is right has the usual form
    if number is None:
        return None
    other = _surd(got)
    return None if other is None else number == other


def _surd(text: str) -> Surd | None:
    number = exact_number(text)
    if number is None:
        return exact_surd(_rewritten(text))
    return {(1, 0): number} if number else {}  # of any size: it is not written out


def _numbers_equal(
    got: Fraction, right: Fraction, answer: Answer, truth: Answer, percent: PercentRule
) -> bool:
    if answer.percent == truth.percent:
        return got == right
    as_values = [n / 100 if a.percent else n for n, a in ((got, answer), (right, truth))]
    return as_values[0] == as_values[1] or (percent == "either" and got == right)


def _by_algebra(answer: str, ground_truth: str) -> bool:
    from math_verify import verify  # noqa: PLC0415

    texts = [_rewritten(text) for text in (answer, ground_truth)]
    complex_numbers = all(_is_complex_or_number(text) for text in texts) and any(
        _IMAGINARY.search(text) for text in texts
    )
    parsed = [_parsed(text, complex_numbers=complex_numbers) for text in texts]
    if not parsed[0] or not parsed[1]:
        return False
    numbers = [_number(candidates) for candidates in parsed]
    if numbers[0] is not None and numbers[1] is not None:
        return _same_number(numbers[0], numbers[1])
    return bool(verify(list(parsed[1]), list(parsed[0]), timeout_seconds=None))


def _rewritten(text: str) -> str:
    """Plain functions as LaTeX, mixed and repeating numbers as fractions, chains as intervals."""
    number = exact_number(text)
    if number is not None:
        if max(number.numerator.bit_length(), number.denominator.bit_length()) > _MAX_BITS:
            return text
        return rf"\frac{{{number.numerator}}}{{{number.denominator}}}"
    for pattern, by in _PLAIN_FUNCTIONS:
        text = pattern.sub(by, text)
    chain = _CHAIN.fullmatch(text)
    if chain:
        left = "(" if chain["first"] == "<" else "["
        end = ")" if chain["second"] == "<" else "]"
        return f"{left}{chain['low']}, {chain['high']}{end}"
    return text


def _is_complex_or_number(text: str) -> bool:
    """Whether nothing in it is a symbol other than i."""
    without_commands = re.sub(r"\\[A-Za-z]+", "", text)
    return not re.search(r"[A-Za-df-hj-z]", without_commands)


@functools.lru_cache(maxsize=1024)  # a ground truth comes with every sample of its prompt
def _parsed(text: str, *, complex_numbers: bool) -> tuple[object, ...]:
    """What math-verify reads; its last entry is the text itself, which compares as text."""
    import sympy  # noqa: PLC0415
    from math_verify import LatexExtractionConfig, parse  # noqa: PLC0415

    # Its reader of plain expressions hands the text to sympy's parse_expr, which evaluates it.
    found: list[object] = parse(
        f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None
    )
    if complex_numbers:
        found = [
            entry.subs({s: sympy.I for s in entry.free_symbols if s.name == "i"})
            if isinstance(entry, sympy.Expr)
            else entry
            for entry in found
        ]
    return tuple(found)


def _number(candidates: tuple[object, ...]) -> "sympy.Expr | None":
    import sympy  # noqa: PLC0415

    for entry in candidates:
        if isinstance(entry, sympy.Expr) and not entry.free_symbols and entry.is_number:
            return entry
    return None


def _same_number(got: "sympy.Expr", right: "sympy.Expr") -> bool:
    import sympy  # noqa: PLC0415

    got, right = (sympy.nsimplify(n, rational=True) for n in (got, right))
    if got == right:
        return True
    if got.is_Rational and right.is_Rational:
        return False
    difference = got - right
    scale = max(abs(sympy.N(right, _DIGITS)), sympy.Integer(1))
    bound = scale * sympy.Float(10) ** (-_DIGITS // 2)
    size = abs(sympy.N(difference, _DIGITS))
    # most wrong answers are far off, which digits show at a fraction of the cost of algebra
    if size.is_finite and size > bound:
        return False
    if sympy.expand(difference) == 0:
        return True
    exact = difference.equals(0)  # simplifies by every means, which takes its time
    return bool(size < bound if exact is None else exact)
