"""TensorBoard: one event file in the run folder. Needs the extra ``rl-metrics[tensorboard]``.

``tensorboard --logdir runs`` finds it. A resumed run replaces the file, so that any reader finds
every step once. Nothing is sent anywhere.
"""

import io
import os
import socket
import time
from typing import ClassVar, Literal, final

import attrs

from rl_metrics.appending import AppendedFile
from rl_metrics.jsonl import StepRecord
from rl_metrics.trackers.sink import TrackedRun

_SUFFIX = ".rl-metrics"
"""Of our event files: others in the same folder, a profiler's say, are left alone."""


@final
@attrs.frozen(kw_only=True)
class TensorBoardConfig:
    """An event file in ``tensorboard/`` of the run folder; there is nothing to set."""

    kind: ClassVar[Literal["tensorboard"]] = "tensorboard"


@final
class TensorBoardSink:
    """Appends one event per step, with all its scalars, and waits until the disk has it."""

    def __init__(self, run: TrackedRun) -> None:
        # an extra, without type information, as below
        from tensorboard.compat.proto import (  # type: ignore[import-untyped]  # noqa: PLC0415
            event_pb2,
            summary_pb2,
        )

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        for earlier in folder.glob(f"*{_SUFFIX}"):
            earlier.unlink()  # what it holds is in metrics.jsonl, and comes again
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}{_SUFFIX}"
        self._file = AppendedFile.create(folder / name)
        first = self._event(wall_time=now, file_version="brain.Event:2")
        self._file.append(_framed(first.SerializeToString()))

    def write(self, record: StepRecord) -> None:
        """One event; if the disk refuses it, the file ends with the one before."""
        scalars = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in record.values.items()
        ]
        event = self._event(
            wall_time=record.unix_seconds, step=record.step, summary=self._summary(value=scalars)
        )
        self._file.append(_framed(event.SerializeToString()))

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002 - an event file has no end
        """Close the file."""
        self._file.close()


def _framed(event: bytes) -> bytes:
    """The event with length and checksums, as event files hold it."""
    from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]  # noqa: PLC0415
        RecordWriter,
    )

    buffer = io.BytesIO()
    RecordWriter(buffer).write(event)
    return buffer.getvalue()
