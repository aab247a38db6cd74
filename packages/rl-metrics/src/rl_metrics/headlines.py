"""The few numbers that stand on top of a report."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rl_metrics.jsonl import StepRecord
from rl_metrics.svg_axes import number


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """One number with its name."""

    label: str
    value: str
    note: str


def column(records: Iterable[StepRecord], name: str) -> list[float]:
    """The values of a metric, in order of the steps."""
    return [record.values[name] for record in records if name in record.values]


def headlines_of(records: Sequence[StepRecord]) -> list[Headline]:
    """Those for which the records hold something."""
    headlines = []
    for name, label, decimals, note in (
        ("reward/heldout/mean", "Held-out reward", 2, "first to last"),
        ("reward/train/mean", "Sampled reward", 2, "first to last"),
        ("length/completion/mean", "Completion length", 1, "tokens, first to last"),
    ):
        values = column(records, name)
        if values:
            ends = [_rounded(value, decimals) for value in (values[0], values[-1])]
            value = " \u2192 ".join(ends)
            headlines.append(Headline(label=label, value=value, note=note))
    elapsed = column(records, "time/elapsed/seconds")
    step_seconds = column(records, "time/step/seconds")
    headlines.append(
        Headline(
            label="Steps",
            value=number(records[-1].step),
            note=f"{sum(step_seconds) / len(step_seconds):.1f} s each" if step_seconds else "",
        )
    )
    if elapsed:
        headlines.append(Headline(label="Wall time", value=_duration(elapsed[-1]), note=""))
    mismatch = column(records, "mismatch/logprob/max")
    if mismatch:
        headlines.append(
            Headline(
                label="Sampler mismatch",
                value=f"{max(mismatch):.2g}",
                note="nats, largest",
            )
        )
    return headlines


def _rounded(value: float, decimals: int) -> str:
    if not math.isfinite(value):  # of a step that blew up
        return number(value)
    return f"{value:.{decimals}f}" if abs(value) < 100 else number(round(value))  # noqa: PLR2004 - three digits will do


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return number(seconds)
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minute} min"
    return f"{minute} min {second} s" if minute else f"{second} s"
