"""Completions before and after."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rl_metrics import CompletionPair, print_completions, read_completions, write_completions

PAIR = CompletionPair(
    prompt="What is 9 + 3?",
    ground_truth="12",
    before="[red]To find[/red] \x1b[31mit",
    after="9 + 3 = 12",
    reward_before=None,
    reward_after=0.5,
)


def test_the_table_shows_texts_as_they_are() -> None:
    """Markup in a completion is not interpreted, nor is an escape sequence obeyed."""
    file = io.StringIO()
    print_completions([PAIR], console=Console(file=file, width=100))
    text = file.getvalue()
    assert "[red]To find[/red] \u241b[31mit" in text
    assert "\x1b" not in text
    assert "9 + 3 = 12" in text
    assert "not scored" in text
    assert "reward 0.5" in text


def test_broken_markup_is_no_error() -> None:
    """A closing tag that rich does not know is text."""
    file = io.StringIO()
    pair = CompletionPair(
        prompt="[/x]", ground_truth="", before="[/]", after="[", reward_before=0, reward_after=0
    )
    print_completions([pair], console=Console(file=file, width=100))
    assert "[/x]" in file.getvalue()


def test_pairs_survive_their_file(tmp_path: Path) -> None:
    """What is written is read back, escape sequences included."""
    path = tmp_path / "completions.json"
    write_completions([PAIR], path)
    assert read_completions(path) == [PAIR]
    assert [entry.name for entry in tmp_path.iterdir()] == ["completions.json"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "expected a JSON list of completion pairs: "),
        ("{}", "expected a JSON list of completion pairs, got dict"),
        ('[{"prompt": "x"}]', r"entry 0: expected an object with the keys .* got \['prompt'\]"),
        ("[3]", "entry 0: expected an object with the keys .* got 3"),
    ],
)
def test_a_broken_file_is_named(content: str, text: str, tmp_path: Path) -> None:
    """The message holds the file and the entry."""
    path = tmp_path / "completions.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"completions\.json.*{text}"):
        read_completions(path)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("before", 3, "expected a string for before, got 3"),
        ("reward_after", "1", "expected a number or null for reward_after, got '1'"),
        ("reward_after", True, "expected a number or null for reward_after, got True"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: object, text: str, tmp_path: Path) -> None:
    """Types are checked where the file is read, not where it is shown."""
    path = tmp_path / "completions.json"
    write_completions([PAIR], path)
    entries = json.loads(path.read_text())
    entries[0][name] = value
    path.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=text):
        read_completions(path)
