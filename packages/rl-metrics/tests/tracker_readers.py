"""Read back what a tracker holds, by its own package; prints JSON.

    python tracker_readers.py KIND RUN_FOLDER

The answer is a list of runs, oldest first, each a list of [step, {name: value}] and how it ended.
"""

import json
import math
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

Rows = list[tuple[int, dict[str, object]]]

_BLOCK = 32768
_HEADER = struct.Struct("<IHB")
"""Of a piece in a ``.wandb`` file, which is a LevelDB log: checksum, length, kind."""


def tensorboard(folder: Path) -> list[tuple[Rows, str]]:
    """TensorBoard's accumulator, as its web page uses it."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]  # noqa: PLC0415
        EventAccumulator,
    )

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    rows: dict[int, dict[str, object]] = {}
    num_points = 0
    for name in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(name):
            rows.setdefault(event.step, {})[name] = event.value
            num_points += 1
    assert num_points == sum(map(len, rows.values())), "a step stands there twice"
    return [(sorted(rows.items()), "")]


def wandb(folder: Path) -> list[tuple[Rows, str]]:
    """The offline runs' transaction logs, by wandb's own message types."""
    from wandb.proto import wandb_internal_pb2  # noqa: PLC0415

    message = wandb_internal_pb2.Record  # type: ignore[attr-defined]  # made when imported
    runs = []
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        rows: Rows = []
        end = "running"
        for data in _records(path.read_bytes()):
            record = message.FromString(data)
            if record.WhichOneof("record_type") == "history":
                values = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                step = values["_step"]
                rows.append((int(step), {k: v for k, v in values.items() if not k.startswith("_")}))
            elif record.WhichOneof("record_type") == "exit":
                end = str(record.exit.exit_code)
        runs.append((rows, end))
    return runs


def _records(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log whose first block begins with wandb's seven bytes."""
    position, pieces = 7, b""
    while position + _HEADER.size <= len(content):
        if _BLOCK - position % _BLOCK < _HEADER.size:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = _HEADER.unpack_from(content, position)
        position += _HEADER.size
        pieces += content[position : position + length]
        position += length
        if kind in {1, 4}:  # whole, or the last piece
            yield pieces
            pieces = b""


def mlflow(folder: Path) -> list[tuple[Rows, str]]:
    """MLflow's client; the store is beside the run folder."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow.tracking import MlflowClient  # noqa: PLC0415

    client = MlflowClient(tracking_uri=f"file://{folder.parent / 'mlruns'}")
    (experiment,) = client.search_experiments(filter_string="name = 'quick'")
    found = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    runs = []
    for run in found:
        rows: dict[int, dict[str, object]] = {}
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                assert name not in rows.setdefault(metric.step, {}), "a step stands there twice"
                rows[metric.step][name] = metric.value
        assert run.data.params == {"loop.num_steps": "5"}
        runs.append((sorted(rows.items()), run.info.status))
    return runs


def trackio(folder: Path) -> list[tuple[Rows, str]]:
    """trackio's storage, which its dashboard reads."""
    os.environ["TRACKIO_DIR"] = str(folder.parent / "trackio")
    from trackio import Api  # noqa: PLC0415
    from trackio.sqlite_storage import SQLiteStorage  # noqa: PLC0415

    runs = []
    for run in Api().runs("quick"):
        assert run.config is not None
        assert run.config["loop.num_steps"] == 5
        logs = SQLiteStorage.get_logs("quick", run.name, run_id=run.id)
        rows = [
            (log["step"], {k: v for k, v in log.items() if k not in {"step", "timestamp"}})
            for log in logs
        ]
        runs.append((rows, ""))
    return runs


def plain(value: object) -> object:
    """NaN and infinity as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.lower().replace("infinity", "inf") if isinstance(value, str) else value


if __name__ == "__main__":
    read = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "trackio": trackio}
    result = [
        ([(step, {k: plain(v) for k, v in values.items()}) for step, values in rows], end)
        for rows, end in read[sys.argv[1]](Path(sys.argv[2]))
    ]
    print(json.dumps(result))  # noqa: T201
