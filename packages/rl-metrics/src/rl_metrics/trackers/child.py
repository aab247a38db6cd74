"""The process of one tracker: records in by standard input, one answer each by standard output.

Started by `rl_metrics.trackers.process`. Whatever the tracker prints goes to standard error. The
end of the input without a goodbye means that the run has died; the tracker is then closed as
failed, after everything that was sent.
"""

import json
import os
from pathlib import Path
from typing import BinaryIO

from rl_metrics.jsonl import parse_record
from rl_metrics.trackers.config import TrackerConfig, tracker_from_json
from rl_metrics.trackers.mlflow import MlflowConfig, MlflowSink
from rl_metrics.trackers.requests import OpenRequest
from rl_metrics.trackers.sink import MetricsSink, TrackedRun
from rl_metrics.trackers.tensorboard import TensorBoardConfig, TensorBoardSink
from rl_metrics.trackers.trackio import TrackioConfig, TrackioSink
from rl_metrics.trackers.wandb import WandbConfig, WandbSink


def open_sink(config: TrackerConfig, run: TrackedRun) -> MetricsSink:
    """The sink that a configuration is for."""
    match config:
        case TensorBoardConfig():
            return TensorBoardSink(run)
        case WandbConfig():
            return WandbSink(config, run)
        case MlflowConfig():
            return MlflowSink(config, run)
        case TrackioConfig():
            return TrackioSink(config, run)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Obey requests, one per line, until the input ends."""
    sink: MetricsSink | None = None
    closed = False
    for line in requests:
        problem = ""
        try:
            request = json.loads(line)
            match request["do"]:
                case "open":
                    sink = _open(request)
                case "close":
                    closed = True
                    if sink is not None:
                        sink.close(failed=request["failed"])
                case "write" if sink is not None:
                    sink.write(parse_record(request["record"].encode(), "the run's request"))
        except Exception as error:  # noqa: BLE001 - whatever a vendor raises is for the run to say
            problem = f"{type(error).__name__}: {error}"
        answers.write(json.dumps({"problem": problem}).encode() + b"\n")
        answers.flush()
    if sink is not None and not closed:
        sink.close(failed=True)


def _open(request: OpenRequest) -> MetricsSink:
    run = request["run"]
    return open_sink(
        tracker_from_json(request["config"]),
        TrackedRun(
            name=run["name"],
            folder=Path(run["folder"]),
            is_resumed=run["is_resumed"],
            settings=run["settings"],
        ),
    )


def main() -> None:
    """Serve the process that started this one."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a tracker prints is not an answer
    requests = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)  # nor are requests for what it asks, or for its own processes
    serve(requests, answers)


if __name__ == "__main__":
    main()
