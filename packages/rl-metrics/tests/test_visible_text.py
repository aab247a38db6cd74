"""Text that a model wrote."""

import pytest

from rl_metrics.visible import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("9 + 3 = 12\n\u00e9 \u6570", "9 + 3 = 12\n\u00e9 \u6570"),
        ("\x1b[31mred\x1b]0;title\x07", "\u241b[31mred\u241b]0;title\u2407"),
        ("a\rb\tc\x7f", "a\u240db\u2409c\u2421"),
        ("\x9b31m", "<U+009B>31m"),
        ("abc\u202edcba", "abc<U+202E>dcba"),
        ("zero\u200bwidth", "zero<U+200B>width"),
        ("\ud800", "<U+D800>"),
    ],
)
def test_what_a_terminal_would_obey_is_shown(text: str, shown: str) -> None:
    """Escape sequences, carriage returns and direction marks are symbols; letters stay."""
    assert visible(text) == shown


def test_long_text_is_cut_and_says_so() -> None:
    """An ellipsis stands for the rest."""
    assert visible("abcdef", max_characters=3) == "abc\u2026"
    assert visible("abc", max_characters=3) == "abc"
