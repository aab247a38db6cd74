r"""Reading a written answer as an exact number made of fractions, square roots and pi.

After plain numbers these are the most frequent answers that need algebra: ``\frac{3+\sqrt{5}}{2}``,
``4\sqrt{3}-6``, ``\frac{9\pi}{4}``. Such a number is a sum of rational multiples of
:math:`\sqrt{n}\,\pi^k` with square-free `n`. These are linearly independent over the rationals
(Besicovitch 1940 for the roots; pi is transcendental), so two numbers are equal exactly if their
coefficients are. That takes some tens of microseconds, and milliseconds in an algebra system.

What is not wholly read is not guessed at, nor is what can be read in two ways, such as
``1/2\sqrt{3}`` or ``2 3``: the caller then asks an algebra system.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from math import gcd
from typing import final

Surd = Mapping[tuple[int, int], Fraction]
"""Coefficients, none of them 0, of the products of the root of `n` and the `k`-th power of pi."""

_TOKEN = re.compile(
    r"\s*(?P<token>[0-9]+(?:\.[0-9]+)?|\\frac|\\sqrt|\\pi(?![A-Za-z])|\\cdot(?![A-Za-z])"
    r"|\\times(?![A-Za-z])|[-+*/^{}()])"
)
_MAX_TEXT = 200
_MAX_RADICAND = 10**8
"""Above, taking squares out would take longer than an algebra system."""
_MAX_TERMS, _MAX_BITS, _MAX_POWER = 32, 1024, 20
_MAX_DEPTH = 30
"""Of parentheses, roots and fractions in each other; each takes some frames of Python's stack."""
_ONE = (1, 0)


class _NotReadError(Exception):
    """The text is something else."""


def exact_surd(text: str) -> Surd | None:
    """The number that a normalised text is, exactly, or None if it is anything else.

    Args:
        text: as `rl_tasks.answer_text.normalised_answer` leaves it.
    """
    if len(text) > _MAX_TEXT:
        return None
    tokens, place = list[str](), 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if not match:
            return None
        tokens.append(match["token"])
        place = match.end()
    reader = _Reader(tokens)
    try:
        value = reader.sum()
    except _NotReadError:
        return None
    return value if reader.next is None else None


@final
class _Reader:
    """A grammar of sums, products, fractions, roots and small powers."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0
        self._depth = 0

    @property
    def next(self) -> str | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _take(self) -> str:
        if self.next is None:
            raise _NotReadError
        self._place += 1
        return self._tokens[self._place - 1]

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise _NotReadError

    def sum(self) -> Surd:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _NotReadError
        negative = self.next == "-"
        if self.next in {"-", "+"}:
            self._take()
        value = _scaled(self._product(), -1 if negative else 1)
        while self.next in {"-", "+"}:
            sign = -1 if self._take() == "-" else 1
            value = _added(value, _scaled(self._product(), sign))
        self._depth -= 1
        return value

    def _product(self) -> Surd:
        value = self._power()
        divided = False
        while True:
            word = self.next
            if word in {"*", "\\cdot", "\\times", "/"}:
                self._take()
                if divided:
                    raise _NotReadError  # what a second operator behind a slash means is unclear
                divided = word == "/"
                factor = self._power()
                value = _multiplied(value, _inverse(factor) if divided else factor)
            elif word in {"\\sqrt", "\\pi", "(", "\\frac"}:
                if divided or (word == "\\frac" and self._tokens[self._place - 1][-1].isdigit()):
                    raise _NotReadError  # 1/2\pi; and 2\frac{1}{2} is a mixed number
                if word == "(" and not self._sum_in_parentheses():
                    raise _NotReadError  # 3(1), of which math-verify makes a mixed number
                value = _multiplied(value, self._power())
            elif word is not None and (word[0].isdigit() or word in {"{", "^"}):
                raise _NotReadError
            else:
                return value

    def _sum_in_parentheses(self) -> bool:
        """Whether the parentheses that open here hold more than one term."""
        depth = 0
        for place in range(self._place, len(self._tokens)):
            word = self._tokens[place]
            depth += (word in {"(", "{"}) - (word in {")", "}"})
            if depth == 0:
                return False
            if depth == 1 and word in {"+", "-"} and place > self._place + 1:
                return True
        return False

    def _power(self) -> Surd:
        value = self._factor()
        if self.next != "^":
            return value
        self._take()
        braced = self.next == "{"
        if braced:
            self._take()
        exponent = self._take()
        if braced:
            self._expect("}")
        if not exponent.isdigit() or int(exponent) > _MAX_POWER:
            raise _NotReadError
        if not braced and len(exponent) > 1:
            raise _NotReadError  # TeX takes the first digit alone
        power: Surd = {_ONE: Fraction(1)}
        for _ in range(int(exponent)):
            power = _multiplied(power, value)
        return power

    def _factor(self) -> Surd:
        word = self._take()
        if word[0].isdigit():
            return _rational(Fraction(word))
        if word == "\\pi":
            return {(1, 1): Fraction(1)}
        if word == "(":
            value = self.sum()
            self._expect(")")
            return value
        if word == "\\sqrt":
            return _root(self._argument())
        if word == "\\frac":
            top = self._argument()
            return _multiplied(top, _inverse(self._argument()))
        raise _NotReadError

    def _argument(self) -> Surd:
        """In braces, or a single digit; of two digits TeX would take the first alone."""
        if self.next is not None and self.next.isdigit() and len(self.next) == 1:
            return _rational(Fraction(self._take()))
        self._expect("{")
        value = self.sum()
        self._expect("}")
        return value


def _rational(value: Fraction) -> Surd:
    return {_ONE: value} if value else {}


def _scaled(value: Surd, by: Fraction | int) -> Surd:
    return {basis: coefficient * by for basis, coefficient in value.items()} if by else {}


def _added(one: Surd, other: Surd) -> Surd:
    total = dict(one)
    for basis, coefficient in other.items():
        total[basis] = total.get(basis, Fraction(0)) + coefficient
    return _bounded(total)


def _multiplied(one: Surd, other: Surd) -> Surd:
    total: dict[tuple[int, int], Fraction] = {}
    for (radicand, power), coefficient in one.items():
        for (other_radicand, other_power), other_coefficient in other.items():
            common = gcd(radicand, other_radicand)
            basis = (radicand * other_radicand // common**2, power + other_power)
            product = coefficient * other_coefficient * common
            total[basis] = total.get(basis, Fraction(0)) + product
    return _bounded(total)


def _bounded(value: dict[tuple[int, int], Fraction]) -> Surd:
    kept = {basis: coefficient for basis, coefficient in value.items() if coefficient}
    bits = max(
        (max(c.numerator.bit_length(), c.denominator.bit_length()) for c in kept.values()),
        default=0,
    )
    if len(kept) > _MAX_TERMS or bits > _MAX_BITS:
        raise _NotReadError
    return kept


def _inverse(value: Surd) -> Surd:
    """Of one term, or of two whose squares are rational, by their conjugate."""
    if len(value) == 1:
        (((radicand, power), coefficient),) = value.items()
        return {(radicand, -power): 1 / (coefficient * radicand)}
    if len(value) == 2 and not any(power for _, power in value):  # noqa: PLR2004
        (kept, first), (turned, second) = value.items()
        norm = first**2 * kept[0] - second**2 * turned[0]
        return _scaled({kept: first, turned: -second}, 1 / norm)
    raise _NotReadError


def _root(value: Surd) -> Surd:
    """Of a rational number that is not negative."""
    if not value:
        return {}
    if set(value) != {_ONE} or value[_ONE] < 0:
        raise _NotReadError
    number = value[_ONE]
    radicand = number.numerator * number.denominator
    if radicand > _MAX_RADICAND:
        raise _NotReadError
    outside, divisor = 1, 2
    while divisor**2 <= radicand:
        while radicand % divisor**2 == 0:
            radicand //= divisor**2
            outside *= divisor
        divisor += 1
    return {(radicand, 0): Fraction(outside, number.denominator)}
