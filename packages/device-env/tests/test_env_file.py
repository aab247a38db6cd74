"""Environment files."""

import pytest

from device_env import EnvFileError
from device_env.env_file import parse_env_file


def test_assignments_with_their_lines() -> None:
    """Comments, export, quotes and several assignments on a line are read; the last one wins."""
    text = "# threads\nexport A=1 B='two words'\n\nC=\"x\"  # why\nA=3\n"
    found = parse_env_file(text)
    assert {name: (one.value, one.line) for name, one in found.items()} == {
        "A": ("3", 5),
        "B": ("two words", 2),
        "C": ("x", 4),
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ray start --head", r"line 1: expected NAME=value, got 'ray'"),
        ("A='open", r"line 1: the quote ' is not closed"),
        ("A=$HOME/x", r"line 1: expected a literal value for A, got one that refers to"),
        ("A=`date`", r"line 1: expected a literal value for A, got one that refers to"),
        ("A=~/x", r"line 1: expected a literal value for A, got one that refers to"),
        ("1A=2", r"line 1: expected NAME=value, got '1A'"),
        ("A=a;rm", r"line 1: expected a literal value, got ';' outside quotes"),
        ("A=a b", r"line 1: expected one word behind A=, got several"),
        ("export A", r"line 1: expected NAME=value, got 'A'"),
    ],
)
def test_other_lines_are_refused(line: str, message: str) -> None:
    """A line that is no literal assignment is refused with its number."""
    with pytest.raises(EnvFileError, match=message):
        parse_env_file(line)


def test_a_dollar_in_single_quotes_is_literal() -> None:
    """The shell does not expand in single quotes either."""
    assert parse_env_file("A='$x'")["A"].value == "$x"


def test_a_hash_inside_a_word_is_no_comment() -> None:
    """Only a # at the beginning of a word begins a comment, as in a shell."""
    found = parse_env_file("A=a#b # c\nB=#x\n# D=1\nC='two\nlines'\nE=1\r\n")
    assert {name: one.value for name, one in found.items()} == {
        "A": "a#b",
        "B": "#x",
        "C": "two\nlines",
        "E": "1",
    }
    assert found["E"].line == 6


@pytest.mark.parametrize(
    "text",
    [
        "VLLM_API_KEY=s3cret $x",
        "VLLM_API_KEY=$s3cret",
        "VLLM_API_KEY='s3cret",
        "PASSWORD=my s3cret",
        "PASSWORD=my;s3cret",
    ],
)
def test_no_message_shows_a_value(text: str) -> None:
    """A line that is refused may hold a secret, and its message ends in a log."""
    with pytest.raises(EnvFileError) as caught:
        parse_env_file(text)
    assert "s3cret" not in str(caught.value)
