"""A sampled answer as a page shows it."""

from dataclasses import dataclass

from rl_metrics.visible import visible


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Its text, and how it was rewarded."""

    text: str
    label: str
    mark: str


def answer_of(text: str, reward: float | None) -> Answer:
    """The answer with everything in it made visible; a reward of None was not to be had."""
    if reward is None:
        return Answer(text=visible(text), label="not scored", mark="open")
    mark = "good" if reward > 0 else "bad"
    return Answer(text=visible(text), label=f"reward {reward:g}", mark=mark)
