"""``$(( ... ))`` of a shell script, where all of it is known before the script runs.

device-env's reader of scripts leaves arithmetic unknown; launch scripts compute lengths with it.
A variable counts as known when the script assigns it once, and a whole number.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping

_ASSIGNMENT = re.compile(
    r"^[ \t]*(?:export[ \t]+|readonly[ \t]+|local[ \t]+)?(?P<name>[A-Za-z_]\w*)=(?P<value>[^\n#]*)",
    re.MULTILINE,
)
_NUMBER = re.compile(r"[\"']?(?:\$\{\w+:?[-=])?(?P<number>-?\d+)\}?[\"']?[ \t;]*\\?\Z")
_NAMES = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")


def _truncated(left: int, right: int) -> int:
    """Division as a shell has it, toward zero."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: _truncated,
    ast.Mod: lambda left, right: left - right * _truncated(left, right),
}
_LONGEST = 200
_WORD = 2**63


def with_arithmetic_done(text: str) -> str:
    """The script with the value of every ``$(( ... ))`` that is known in its place."""
    while True:
        known = _known(text)
        for start, end in _expansions(text):
            value = _value(text[start + 3 : end - 2], known)
            if value is not None:
                text = text[:start] + str(value) + text[end:]
                break
        else:
            return text


def _known(text: str) -> dict[str, int]:
    values: dict[str, list[str]] = {}
    for found in _ASSIGNMENT.finditer(text):
        values.setdefault(found["name"], []).append(found["value"].strip())
    known: dict[str, int] = {}
    for name, given in values.items():
        number = _NUMBER.fullmatch(given[0])
        if len(given) == 1 and number is not None:
            known[name] = int(number["number"])
    return known


def _expansions(text: str) -> list[tuple[int, int]]:
    """Where each ``$((`` and its ``))`` stand, innermost first."""
    found: list[tuple[int, int]] = []
    start = text.find("$((")
    while start >= 0:
        depth = 0
        for place in range(start + 1, min(len(text), start + _LONGEST)):
            depth += (text[place] == "(") - (text[place] == ")")
            if depth == 0:
                found.append((start, place + 1))
                break
        start = text.find("$((", start + 1)
    return sorted(found, key=lambda span: span[1] - span[0])


def _value(expression: str, known: Mapping[str, int]) -> int | None:
    names = _NAMES.findall(expression)
    if any(name not in known for name in names):
        return None
    plain = _NAMES.sub(lambda found: f"({known[found[1]]})", expression).replace("/", "//")
    try:
        return _evaluated(ast.parse(plain.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _evaluated(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluated(left), _evaluated(right))
            if not -_WORD <= value < _WORD:
                raise ValueError("a shell would wrap it around")
            return value
        case _:
            raise ValueError(ast.dump(node))
