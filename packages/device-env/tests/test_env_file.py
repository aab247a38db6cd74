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
        ("A='open", r"line 1: No closing quotation"),
        ("A=$HOME/x", r"line 1: expected a literal value, got 'A=\$HOME/x'"),
        ("1A=2", r"line 1: expected NAME=value, got '1A=2'"),
    ],
)
def test_other_lines_are_refused(line: str, message: str) -> None:
    """A line that is no literal assignment is refused with its number."""
    with pytest.raises(EnvFileError, match=message):
        parse_env_file(line)


def test_a_dollar_in_single_quotes_is_literal() -> None:
    """The shell does not expand in single quotes either."""
    assert parse_env_file("A='$x'")["A"].value == "$x"
