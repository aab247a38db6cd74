"""Tool calls in a completion, and a calculator as an example of a tool.

Calls are read in the form that Qwen, Hermes and SmolLM2 write::

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "12 * 7"}}
    </tool_call>

What a model writes is data: a call names one of the given functions, and the calculator's own
grammar knows numbers, ``+ - * / **`` and parentheses.
"""

import ast
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from rl_tasks.problem import ChatMessage, JsonValue

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MAX_CALLS = 16
_MAX_EXPRESSION = 200
_MAX_BITS = 4_096
"""Size of a number that the calculator goes on with: 1233 decimal digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call that a model wrote."""

    name: str
    arguments: Mapping[str, JsonValue]


class ToolError(ValueError):
    """A call that cannot be answered; its message is for the model."""


Tool = Callable[[Mapping[str, JsonValue]], str]
"""Takes the arguments and returns what the model is told."""


def tool_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls in a completion, in their order; none if there is none.

    Raises:
        ToolError: if one is not JSON of the form above, never closes, or if there are more than 16.
    """
    calls: list[ToolCall] = []
    place = text.find(_OPEN)
    while place != -1:
        end = text.find(_CLOSE, place)
        if end == -1:
            message = f"a {_OPEN} without {_CLOSE}"
            raise ToolError(message)
        if len(calls) == _MAX_CALLS:
            message = f"more than {_MAX_CALLS} tool calls in one turn"
            raise ToolError(message)
        calls.append(_call(text[place + len(_OPEN) : end]))
        place = text.find(_OPEN, end)
    return tuple(calls)


def answer_tool_calls(text: str, tools: Mapping[str, Tool]) -> tuple[ChatMessage, ...]:
    """One message with role ``tool`` for each call of a completion; none if it calls nothing.

    A call that is no call, names no tool, or that its tool refuses is answered with what is wrong:
    the model gets to see its mistake, and the exchange goes on.
    """
    try:
        calls = tool_calls(text)
    except ToolError as error:
        return (ChatMessage(role="tool", content=f"error: {error}"),)
    return tuple(ChatMessage(role="tool", content=_answer(call, tools)) for call in calls)


CALCULATOR_SCHEMA: Mapping[str, JsonValue] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an arithmetic expression exactly.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Numbers, + - * / ** and parentheses, such as (3 + 4) * 12.5",
                }
            },
            "required": ["expression"],
        },
    },
}
"""What the chat template shows to the model."""


def calculator(arguments: Mapping[str, JsonValue]) -> str:
    """The value of ``arguments["expression"]``, exactly: ``84``, ``0.5``, or ``1/3``.

    Raises:
        ToolError: for anything but a short arithmetic expression with numbers of moderate size.
    """
    expression = arguments.get("expression")
    if not isinstance(expression, str) or set(arguments) != {"expression"}:
        message = "expected one argument, 'expression', a string"
        raise ToolError(message)
    if len(expression) > _MAX_EXPRESSION:
        message = f"expected at most {_MAX_EXPRESSION} characters, got {len(expression)}"
        raise ToolError(message)
    try:
        # a syntax tree is data; nothing of it is run
        tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        detail = f": {error}" if isinstance(error, ToolError) else ""
        message = f"not an arithmetic expression{detail}"
        raise ToolError(message) from error
    except ZeroDivisionError as error:
        message = "division by zero"
        raise ToolError(message) from error
    return _written(value)


def _call(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = "a tool call is not JSON"
        raise ToolError(message) from error
    if (
        not isinstance(call, dict)
        or not isinstance(call.get("name"), str)
        or not isinstance(call.get("arguments"), dict)
    ):
        message = 'expected {"name": ..., "arguments": {...}}'
        raise ToolError(message)
    return ToolCall(name=call["name"], arguments=call["arguments"])


def _answer(call: ToolCall, tools: Mapping[str, Tool]) -> str:
    if call.name not in tools:
        return f"error: no tool {call.name[:50]!r}; there is {', '.join(sorted(tools))}"
    try:
        return tools[call.name](call.arguments)
    except ToolError as error:
        return f"error: {error}"


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _bounded(_OPERATIONS[type(op)](_value(left), _value(right)))
        case _:
            message = f"{type(node).__name__} is not known here"
            raise ToolError(message)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) * _bits(base) > _MAX_BITS:
        message = "expected an integer exponent and a result of moderate size"
        raise ToolError(message)
    return base**exponent.numerator


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > _MAX_BITS:
        message = "the numbers become too large"
        raise ToolError(message)
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _written(value: Fraction) -> str:
    """An integer, a decimal number if it ends within 12 places, or a fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    places = value * 10**12
    if places.denominator == 1:
        sign = "-" if value < 0 else ""
        whole, rest = divmod(abs(places.numerator), 10**12)
        return f"{sign}{whole}.{rest:012d}".rstrip("0")
    return f"{value.numerator}/{value.denominator}"
