"""What a model answered before and after training, side by side."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_metrics.atomic import write_atomically
from rl_metrics.visible import visible

_MAX_CHARACTERS = 400
"""Of one answer in the terminal; the report and the file hold all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionPair:
    """One problem with an answer of the untrained and one of the trained model."""

    prompt: str
    ground_truth: str
    before: str
    after: str

    reward_before: float | None
    """Reward of `before`; None if the grader could not score it."""

    reward_after: float | None
    """Reward of `after`; None if the grader could not score it."""


def print_completions(pairs: Sequence[CompletionPair], *, console: Console | None = None) -> None:
    """Print a table: prompt, before, after, each answer with its reward.

    The texts are shown as they are: neither rich's markup nor a terminal's escape sequences in
    them take effect. Long answers are cut at 400 characters.
    """
    table = Table(
        box=box.ROUNDED, show_lines=True, expand=False, header_style="bold", border_style="dim"
    )
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("before", ratio=3, overflow="fold")
    table.add_column("after", ratio=3, overflow="fold")
    for pair in pairs:
        table.add_row(
            Text(visible(pair.prompt, max_characters=_MAX_CHARACTERS)),
            _answer(pair.before, pair.reward_before),
            _answer(pair.after, pair.reward_after),
        )
    (console or Console()).print(table)


def _answer(text: str, reward: float | None) -> Text:
    if reward is None:
        label, style = "not scored", "yellow"
    else:
        label, style = f"reward {reward:g}", "green" if reward > 0 else "red"
    answer = Text(visible(text.strip(), max_characters=_MAX_CHARACTERS))
    return Text.assemble(answer, "\n", (label, style))


def write_completions(pairs: Sequence[CompletionPair], path: Path) -> None:
    """Write the pairs as a JSON list, atomically."""
    content = json.dumps([asdict(pair) for pair in pairs], indent=1, allow_nan=False)
    write_atomically(path, content.encode() + b"\n")


def read_completions(path: Path) -> list[CompletionPair]:
    """Read what `write_completions` wrote.

    Raises:
        ValueError: for a file of another form; names the file and the entry.
    """
    try:
        entries = json.loads(path.read_bytes())
    except ValueError as error:
        message = f"{path}: expected a JSON list of completion pairs: {error}"
        raise ValueError(message) from error
    if not isinstance(entries, list):
        message = f"{path}: expected a JSON list of completion pairs, got {type(entries).__name__}"
        raise ValueError(message)  # noqa: TRY004 - a broken file, not a caller's wrong type
    return [_pair(entry, f"{path}, entry {index}") for index, entry in enumerate(entries)]


def _pair(entry: object, where: str) -> CompletionPair:
    names = {field.name for field in fields(CompletionPair)}
    if not isinstance(entry, dict) or set(entry) != names:
        got = sorted(entry) if isinstance(entry, dict) else entry
        message = f"{where}: expected an object with the keys {sorted(names)}, got {got}"
        raise ValueError(message)
    for name, value in entry.items():
        is_reward = name.startswith("reward_")
        if not (_is_reward(value) if is_reward else isinstance(value, str)):
            expected = "a number or null" if is_reward else "a string"
            message = f"{where}: expected {expected} for {name}, got {value!r}"
            raise ValueError(message)
    return CompletionPair(**entry)


def _is_reward(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
