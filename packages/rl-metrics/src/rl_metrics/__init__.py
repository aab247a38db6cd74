"""One list of metric names, a progress display, JSONL, trackers, plots and run reports."""

from rl_metrics.comparison import write_comparison
from rl_metrics.completions import (
    CompletionPair,
    print_completions,
    read_completions,
    write_completions,
)
from rl_metrics.histogram import staleness_histogram
from rl_metrics.jsonl import MetricsWriter, StepRecord, read_metrics
from rl_metrics.names import METRICS, Metric, check_names
from rl_metrics.plot import plot_comparison, plot_run
from rl_metrics.progress import ProgressDisplay
from rl_metrics.report import RunReport, read_run, write_report
from rl_metrics.trackers.config import TrackerConfig
from rl_metrics.trackers.fan_out import Trackers
from rl_metrics.trackers.mlflow import MlflowConfig
from rl_metrics.trackers.sink import MetricsSink
from rl_metrics.trackers.tensorboard import TensorBoardConfig
from rl_metrics.trackers.trackio import TrackioConfig
from rl_metrics.trackers.wandb import WandbConfig

__all__ = [
    "METRICS",
    "CompletionPair",
    "Metric",
    "MetricsSink",
    "MetricsWriter",
    "MlflowConfig",
    "ProgressDisplay",
    "RunReport",
    "StepRecord",
    "TensorBoardConfig",
    "TrackerConfig",
    "Trackers",
    "TrackioConfig",
    "WandbConfig",
    "check_names",
    "plot_comparison",
    "plot_run",
    "print_completions",
    "read_completions",
    "read_metrics",
    "read_run",
    "staleness_histogram",
    "write_comparison",
    "write_completions",
    "write_report",
]
