"""Tool calls and the calculator."""

import json

import pytest

from rl_tasks import ChatMessage, ToolCall, ToolError, answer_tool_calls, calculator, tool_calls


def call(expression: object) -> str:
    body = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>\n{body}\n</tool_call>"


def answer(text: str) -> list[str]:
    messages = answer_tool_calls(text, {"calculator": calculator})
    assert all(message.role == "tool" for message in messages)
    return [message.content for message in messages]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * 7", "84"),
        ("1 + 2 * 3 ** 2", "19"),
        ("-(2 - 5) / 4", "0.75"),
        ("1 / 3", "1/3"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** -1", "0.5"),
        ("-1 / 8", "-0.125"),
        ("2 ** 100", "1267650600228229401496703205376"),
        ("1e3", "1000"),
    ],
)
def test_the_calculator_is_exact(expression: str, value: str) -> None:
    """Fractions, not floating point: 0.1 + 0.2 is 0.3."""
    assert calculator({"expression": expression}) == value


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("__import__('os').getcwd()", "Call is not known here"),
        ("9 ** 9 ** 9", "integer exponent and a result of moderate size"),
        ("(((9**99)**9)**9)**9", "integer exponent and a result of moderate size"),
        ("9" * 100 + "**12 * 9**1000", "the numbers become too large"),
        ("2 ** 0.5", "integer exponent"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("x + 1", "Name is not known here"),
        ("True + 1", "Constant is not known here"),
        ("1j", "Constant is not known here"),
        ("[1] * 10 ** 9", "List is not known here"),
        ("(" * 100 + "1", "not an arithmetic expression"),
        ("1+" * 101, "at most 200 characters, got 202"),
        ("", "not an arithmetic expression"),
        ("1e400", "not an arithmetic expression"),
    ],
)
def test_the_calculator_evaluates_nothing_else(expression: str, error: str) -> None:
    """A35: names, calls, lists and towers of powers are answered with what is wrong."""
    with pytest.raises(ToolError, match=error):
        calculator({"expression": expression})


def test_calls_are_read_in_their_order() -> None:
    """Text around them is no call; neither is a text without any."""
    assert tool_calls("Just 4.") == ()
    assert tool_calls(f"First {call('1')} then {call('2')}.") == (
        ToolCall(name="calculator", arguments={"expression": "1"}),
        ToolCall(name="calculator", arguments={"expression": "2"}),
    )


def test_every_call_gets_an_answer() -> None:
    """Also the one that cannot be answered: the model sees its mistake."""
    assert answer_tool_calls("no call", {}) == ()
    assert answer(call("6 * 7") + call("1 / 0")) == ["42", "error: division by zero"]
    assert answer(call(3)) == ["error: expected one argument, 'expression', a string"]
    assert answer('<tool_call>{"name": "search", "arguments": {}}</tool_call>') == [
        "error: no tool 'search'; there is calculator"
    ]
    assert answer("<tool_call>{}</tool_call>") == [
        'error: expected {"name": ..., "arguments": {...}}'
    ]
    assert answer("<tool_call>6 * 7 = </tool_call>") == ["error: a tool call is not JSON"]
    assert answer("<tool_call>" + "[" * 100_000 + "</tool_call>") == [
        "error: a tool call is not JSON"
    ]
    assert answer("<tool_call>{") == ["error: a <tool_call> without </tool_call>"]
    assert answer(call("1") * 17) == ["error: more than 16 tool calls in one turn"]
    assert answer_tool_calls("<tool_call>{", {}) == (
        ChatMessage(role="tool", content="error: a <tool_call> without </tool_call>"),
    )
