"""One list of metric names, a progress display, JSONL, plots and a one-page run report."""

from rl_metrics.completions import (
    CompletionPair,
    print_completions,
    read_completions,
    write_completions,
)
from rl_metrics.jsonl import MetricsWriter, StepRecord, read_metrics
from rl_metrics.names import METRICS, Metric, check_names
from rl_metrics.plot import plot_run
from rl_metrics.progress import ProgressDisplay
from rl_metrics.report import RunReport, read_run, write_report

__all__ = [
    "METRICS",
    "CompletionPair",
    "Metric",
    "MetricsWriter",
    "ProgressDisplay",
    "RunReport",
    "StepRecord",
    "check_names",
    "plot_run",
    "print_completions",
    "read_completions",
    "read_metrics",
    "read_run",
    "write_completions",
    "write_report",
]
