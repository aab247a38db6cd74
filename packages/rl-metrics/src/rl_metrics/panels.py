"""Which metrics are drawn together: the same panels in the picture and in the report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rl_metrics.histogram import STALENESS_BINS
from rl_metrics.jsonl import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One metric of a panel."""

    metric: str
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Metrics that share a vertical axis."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    scale: Literal["linear", "log"] = "linear"
    """``log`` for what spans orders of magnitude; values that are not positive are left out."""

    from_zero: bool = False
    """Whether the axis starts at zero."""

    stacked: bool = False
    """Whether the values of a step are parts of a whole, drawn as shares of one bar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """The points of one line: what the records hold of a metric, in order of the steps."""

    label: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


PANELS = (
    Panel(
        title="Reward",
        unit="reward",
        lines=(
            Line(metric="reward/train/mean", label="sampled"),
            Line(metric="reward/heldout/mean", label="held out"),
        ),
    ),
    Panel(
        title="Completion length",
        unit="tokens",
        lines=(
            Line(metric="length/completion/mean", label="sampled"),
            Line(metric="length/heldout/mean", label="held out"),
        ),
        from_zero=True,
    ),
    Panel(
        title="Ended by the model",
        unit="fraction",
        lines=(Line(metric="length/stopped/fraction", label="ended"),),
        from_zero=True,
    ),
    Panel(
        title="Groups without spread",
        unit="fraction",
        lines=(Line(metric="groups/uniform/fraction", label="uniform"),),
        from_zero=True,
    ),
    Panel(
        title="Mismatch",
        unit="nats",
        lines=(
            Line(metric="mismatch/logprob/max", label="largest"),
            Line(metric="mismatch/logprob/mean", label="mean"),
            Line(metric="mismatch/k3/mean", label="k3"),
        ),
        scale="log",
    ),
    Panel(
        title="Gradient norm",
        unit="",
        lines=(Line(metric="gradient/norm/value", label="before clipping"),),
        from_zero=True,
    ),
    Panel(
        title="Clipped",
        unit="fraction",
        lines=(Line(metric="ratio/clipped/fraction", label="clipped"),),
        from_zero=True,
    ),
    Panel(
        title="Entropy",
        unit="nats per token",
        lines=(Line(metric="entropy/policy/mean", label="entropy"),),
    ),
    Panel(
        title="KL to the reference",
        unit="nats per token",
        lines=(Line(metric="kl/ref/mean", label="KL"),),
    ),
    Panel(
        title="Staleness",
        unit="optimizer steps",
        lines=(
            Line(metric="staleness/trajectory/max", label="largest"),
            Line(metric="staleness/trajectory/mean", label="mean"),
        ),
        from_zero=True,
    ),
    Panel(
        title="Staleness shares",
        unit="of trajectories, by steps",
        lines=tuple(
            Line(metric=f"staleness/{bin_.name}/trajectories", label=bin_.label)
            for bin_ in STALENESS_BINS
        ),
        stacked=True,
    ),
    Panel(
        title="Idle",
        unit="share of the step",
        lines=(
            Line(metric="idle/trainer/fraction", label="trainer"),
            Line(metric="idle/sampler/fraction", label="samplers"),
        ),
        from_zero=True,
    ),
    Panel(
        title="Queue",
        unit="trajectories",
        lines=(
            Line(metric="queue/ready/value", label="waiting"),
            Line(metric="queue/in_flight/value", label="in flight"),
        ),
        from_zero=True,
    ),
    Panel(
        title="Partial and lost",
        unit="share of trajectories, of tokens",
        lines=(
            Line(metric="partial/trajectory/fraction", label="partial"),
            Line(metric="lost/groups/fraction", label="lost"),
        ),
        from_zero=True,
    ),
    Panel(
        title="Wall time",
        unit="seconds",
        lines=(
            Line(metric="time/step/seconds", label="step"),
            Line(metric="time/sample/seconds", label="sample"),
            Line(metric="time/train/seconds", label="train"),
            Line(metric="time/publish/seconds", label="publish"),
            Line(metric="time/handover/seconds", label="hand over"),
        ),
        from_zero=True,
    ),
    Panel(
        title="Throughput",
        unit="tokens per second",
        lines=(
            Line(metric="throughput/sampled/tokens_per_second", label="sampled"),
            Line(metric="throughput/trained/tokens_per_second", label="trained"),
        ),
        from_zero=True,
    ),
    Panel(
        title="Throughput per device",
        unit="tokens per second",
        lines=(
            Line(metric="throughput/sampled_per_device/tokens_per_second", label="sampled"),
            Line(metric="throughput/trained_per_device/tokens_per_second", label="trained"),
        ),
        from_zero=True,
    ),
    Panel(
        title="Publishing weights",
        unit="seconds",
        lines=(
            Line(metric="time/publish/seconds", label="in all"),
            Line(metric="time/publish/max", label="longest"),
            Line(metric="time/publish_pause/seconds", label="paused"),
        ),
        from_zero=True,
    ),
)
"""In the order in which they are drawn; reward first, since it is what a reader came for."""


def panel_series(panel: Panel, records: Sequence[StepRecord]) -> list[Series]:
    """The lines of a panel that have at least one value in the records."""
    series = []
    for line in panel.lines:
        points = [
            (record.step, record.values[line.metric])
            for record in records
            if line.metric in record.values
        ]
        if points:
            steps, values = zip(*points, strict=True)
            series.append(Series(label=line.label, steps=steps, values=values))
    return series


def filled_panels(records: Sequence[StepRecord]) -> list[tuple[Panel, list[Series]]]:
    """The panels for which the records hold something, with their series."""
    panels = [(panel, panel_series(panel, records)) for panel in PANELS]
    return [(panel, series) for panel, series in panels if series]
