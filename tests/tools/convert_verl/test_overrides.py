"""One override, as hydra 1.3.8 reads it."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from verl_conversion.overrides import OverrideError, UnreadOverrideError, Value, parse_override

# Each was given to hydra.core.override_parser of hydra-core 1.3.8, which answers the same; so it
# does, but for the difference that the next test names, for 6000 random texts of these signs.
VALUES: list[tuple[str, Value]] = [
    ("a=1e-6", 1e-06),
    ("a=", ""),
    ("a=2_0", 20),
    ("a=0.6_1.6", "0.6_1.6"),
    ("a='null'", "null"),
    ("a=null", None),
    ("a='[x,y]'", "[x,y]"),
    ("a=[x,y]", ["x", "y"]),
    ("a=b c", "b c"),
    ("a= b ", "b"),
    ("a=007", "007"),
    ("a=-3", -3),
    ("a=+3", 3),
    ("a=.5", 0.5),
    ("a=5.", 5.0),
    ("a=1E5", 100000.0),
    ("a=-inf", -math.inf),
    ("a=FALSE", False),
    ("a=yes", "yes"),
    ('a="q"', "q"),
    (r"a='it\'s'", "it's"),
    (r"a='a\nb'", r"a\nb"),
    (r'a="a\"b"', 'a"b'),
    (r"a='x\\'", "x\\"),
    ("a=[1,2.0,x,'y',null]", [1, 2.0, "x", "y", None]),
    ("a={x:1,y:[2]}", {"x": 1, "y": [2]}),
    ("a={a b:1}", {"a b": 1}),
    ("a=[]", []),
    ("a={}", {}),
    ("a=[ x , y z ]", ["x", "y z"]),
    ("a=[[1],[2]]", [[1], [2]]),
    (r"a=x\,y", "x,y"),
    (r"a=\[x\]", "[x]"),
    ("a=${HOME}/x", "${HOME}/x"),
    ("a=${a:b,c}", "${a:b,c}"),
    ("a=x:y", "x:y"),
    ("a=https://x.y/z", "https://x.y/z"),
    ("a=1_", "1_"),
    ("a=0_1", "0_1"),
    ("a=0x10", "0x10"),
    ("a=1.5e-3_2", 1.5e-32),
    ("a=1e", "1e"),
    ("a=1-2", "1-2"),
    ("a=1 2", "1 2"),
    ("a=null x", "null x"),
    ("a=float(3)", 3.0),
    ("a=int(3.5)", 3),
    ("a=str(1)", "1"),
    ("a=9999999999999999999999999999999", 9999999999999999999999999999999),
]


@pytest.mark.parametrize(("text", "expected"), VALUES)
def test_values_are_those_of_hydra(text: str, expected: Value) -> None:
    found = parse_override(text).value
    assert (type(found), found) == (type(expected), expected)


def test_a_number_as_a_key_becomes_text() -> None:
    """Hydra keeps it a number; a setting's path is text in any case."""
    assert parse_override("a={1:2}").value == {"1": 2}


@pytest.mark.parametrize(
    "text",
    [
        "a=b=c", "a=x#y", "a=(x)", "a=x;y", "a=[x=1]", "a=[x", "a=x]", "a='x", "a='x' y", "a=[1,]",
        "a={'k':1}", "a=~x", "a=é", "a b=1", "0=1", "a", "=1",
    ],
)  # fmt: skip
def test_what_hydra_refuses_is_refused(text: str) -> None:
    with pytest.raises(OverrideError):
        parse_override(text)


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(OverrideError, match="put a list in brackets"):
        parse_override("a=1,2")
    with pytest.raises(OverrideError, match=r"choice\(\) is a sweep"):
        parse_override("a=choice(1,2)")
    with pytest.raises(OverrideError, match="in quotes that reach hydra"):
        parse_override("a=50 000 €")


@pytest.mark.parametrize("text", ["optim@actor.optim=fsdp", "a=sort(2,1)", "a=json_str(1)"])
def test_what_only_hydra_can_tell_is_not_called_refused(text: str) -> None:
    with pytest.raises(UnreadOverrideError, match="not read here"):
        parse_override(text)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[" * 100_000, "nested deeper"),
        ("9" * 5000, "at most 4000 digits"),
        ("int(inf)", "cannot convert"),
        ("'" + "\\" * 100_001, "outside of quotes"),
    ],
)
def test_values_of_any_size_end_in_a_message(value: str, message: str) -> None:
    with pytest.raises(OverrideError, match=message):
        parse_override(f"a={value}")


@pytest.mark.parametrize(
    ("text", "operation", "key"),
    [
        ("a.b=1", "set", "a.b"),
        ("+a.b=1", "add", "a.b"),
        ("++a=1", "force", "a"),
        ("~a", "delete", "a"),
        ("a/b=c", "set", "a/b"),
        ("a-b.0=1", "set", "a-b.0"),
    ],
)
def test_signs_and_keys(text: str, operation: str, key: str) -> None:
    found = parse_override(text)
    assert (found.operation, found.key) == (operation, key)
    assert found.value is None or operation != "delete"
