"""All trackers of a run behind one `write`."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, final

from rl_metrics.effective import flat_settings
from rl_metrics.jsonl import StepRecord
from rl_metrics.trackers.config import TrackerConfig, check_trackers
from rl_metrics.trackers.process import TrackerProcess
from rl_metrics.trackers.sink import TrackedRun

_START_TIMEOUT_S = 60.0
"""How long the run waits for trackers to be ready and to have earlier steps."""

_WRITE_TIMEOUT_S = 5.0
"""How long a step waits for a tracker; one that is behind or not there is not waited for."""

_CLOSE_TIMEOUT_S = 60.0
"""How long the end of the run waits for what is still to be sent."""


@final
class Trackers:
    """Sends records to every tracker. A context manager; made by `open`.

    ``metrics.jsonl`` stays the truth: write there first. A tracker that fails, hangs or dies does
    not end the run and does not hold it up; that is said once, and the steps that it lacks are
    counted. When `write` returns and nothing was said, each tracker has the step where a kill no
    longer takes it away.
    """

    def __init__(
        self, processes: Sequence[TrackerProcess], *, say: Callable[[str], None], write_s: float
    ) -> None:
        self._processes = processes
        self._say = say
        self._write_s = write_s
        self._said: set[tuple[str, str]] = set()
        self._is_closed = False

    @classmethod
    def open(
        cls,
        configs: Sequence[TrackerConfig],
        *,
        folder: Path,
        say: Callable[[str], None],
        records: Sequence[StepRecord] = (),
        write_timeout_s: float = _WRITE_TIMEOUT_S,
    ) -> Self:
        """Start the trackers of a run.

        The run is named after its folder, and trackers that show settings get those of
        ``effective_config.toml``. If an earlier part of the run had trackers, these begin again
        and hold every step once: those of `records`, then what is written.

        Args:
            configs: the trackers, of each kind at most one.
            folder: the run folder; trackers keep their files and logs there.
            say: prints a line for the user, such as `ProgressDisplay.say`.
            records: what ``metrics.jsonl`` holds already, see `read_metrics`.
            write_timeout_s: how long, in seconds, a step waits for a tracker that hangs.

        Raises:
            ValueError: for two trackers of one kind, or a broken ``effective_config.toml``.
            ImportError: if a tracker's package is missing; names the extra.
        """
        check_trackers(configs)
        folder = folder.absolute()
        config_file = folder / "effective_config.toml"
        text = config_file.read_text(encoding="utf-8") if config_file.exists() else ""
        logs = folder / "trackers"
        is_resumed = logs.exists()
        run = TrackedRun(
            name=folder.name,
            folder=folder,
            is_resumed=is_resumed,
            settings=flat_settings(text, where=str(config_file)),
        )
        if configs:
            logs.mkdir(exist_ok=True)
        processes = [
            TrackerProcess(config, run, log=logs / f"{config.kind}.log") for config in configs
        ]
        trackers = cls(processes, say=say, write_s=write_timeout_s)
        for process in processes:
            for record in records:
                process.write(record)
        trackers._wait(processes, _START_TIMEOUT_S)
        return trackers

    @property
    def num_missed(self) -> Mapping[str, int]:
        """Kind of tracker to the number of steps that it lacks so far."""
        return {process.kind: process.num_missed for process in self._processes}

    def write(self, record: StepRecord) -> None:
        """Send one step, the record that `MetricsWriter.write` returned.

        Raises:
            ValueError: after `close`.
        """
        if self._is_closed:
            message = f"cannot write step {record.step}, the trackers are closed"
            raise ValueError(message)
        in_time = [process for process in self._processes if process.is_ready]
        for process in self._processes:
            process.write(record)
        self._wait(in_time, self._write_s)

    def close(self, *, failed: bool = False) -> None:
        """End the run in every tracker; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for process in self._processes:
            process.close(failed=failed, timeout_s=max(1.0, deadline - time.monotonic()))
            self._say_problem(process)
            if process.num_missed:
                self._say(
                    f"tracker {process.kind}: lacks {process.num_missed} of the run's steps; "
                    "metrics.jsonl has them all"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)

    def _wait(self, processes: Sequence[TrackerProcess], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for process in processes:
            if not process.wait(max(0.0, deadline - time.monotonic())):
                self._say_once(
                    process.kind,
                    f"no answer for {timeout_s:g} s; the run goes on and does not wait for it",
                )
        for process in self._processes:
            self._say_problem(process)

    def _say_problem(self, process: TrackerProcess) -> None:
        if process.problem:
            self._say_once(process.kind, process.problem)

    def _say_once(self, kind: str, text: str) -> None:
        if (kind, text) not in self._said:
            self._said.add((kind, text))
            self._say(f"tracker {kind}: {text}")
