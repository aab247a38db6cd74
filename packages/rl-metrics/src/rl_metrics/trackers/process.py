"""One tracker behind a process: what happens to it does not happen to the run.

The tracker's package is imported there and not here, reads an environment of its own, may hang,
crash or print. A thread talks to it, one request and one answer at a time.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import cast, final

from rl_metrics.jsonl import StepRecord, record_line
from rl_metrics.trackers.config import TrackerConfig, tracker_to_json
from rl_metrics.trackers.requests import (
    Answer,
    CloseRequest,
    OpenRequest,
    Request,
    RunFields,
    WriteRequest,
)
from rl_metrics.trackers.sink import TrackedRun

_EXIT_S = 10.0
"""Seconds that a process may take to end after its last answer."""


@final
class TrackerProcess:
    """Takes records at once and hands them on as fast as the tracker takes them."""

    def __init__(self, config: TrackerConfig, run: TrackedRun, *, log: Path) -> None:
        """Start the process; its output is appended to `log`."""
        self.kind = config.kind
        self._log = log
        self._open_request = OpenRequest(
            do="open",
            config=tracker_to_json(config),
            run=RunFields(
                name=run.name,
                folder=str(run.folder),
                is_resumed=run.is_resumed,
                settings=dict(run.settings),
            ),
        )
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                # -P: no module of the folder where the run was started stands in a package's way
                [sys.executable, "-P", "-m", "rl_metrics.trackers.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the run, which then closes its trackers
            )
        self._requests: queue.SimpleQueue[StepRecord | OpenRequest | CloseRequest] = (
            queue.SimpleQueue()
        )
        self._changed = threading.Condition()
        self._num_pending = 0
        self._num_missed = 0
        self._problem = ""
        self._is_open = False
        self._held: list[StepRecord] = []
        self._put(self._open_request)
        self._thread = threading.Thread(target=self._talk, name=f"tracker {self.kind}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the tracker's process."""
        return self._process.pid

    @property
    def num_missed(self) -> int:
        """Steps that the tracker did not take."""
        with self._changed:
            return self._num_missed

    @property
    def is_ready(self) -> bool:
        """Whether it has been opened, and nothing is waiting for it."""
        with self._changed:
            return self._is_open and self._num_pending == 0

    @property
    def problem(self) -> str:
        """What went wrong first; empty if nothing did."""
        with self._changed:
            return self._problem

    def write(self, record: StepRecord) -> None:
        """Hand over one step; returns at once."""
        self._put(record)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the tracker has answered everything; False if it took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_pending == 0, timeout_s)

    def close(self, *, failed: bool, timeout_s: float) -> None:
        """End the tracker's run and its process; kill it if that takes longer than `timeout_s`."""
        self._put(CloseRequest(do="close", failed=failed))
        deadline = time.monotonic() + timeout_s
        if self.wait(timeout_s):
            self._close_pipes()
            timeout_s = min(_EXIT_S, max(1.0, deadline - time.monotonic()))
        else:
            self._note(f"did not finish in {timeout_s:g} s and was ended")
            timeout_s = 0.0
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # a session of its own, hence a group
            self._process.wait()
        self._thread.join()  # it has read the end of the process's answers
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None  # noqa: S101 - made with pipes
            with contextlib.suppress(OSError):  # unsent bytes of a process that is gone
                pipe.close()

    def _put(self, request: StepRecord | OpenRequest | CloseRequest) -> None:
        with self._changed:
            self._num_pending += 1
        self._requests.put(request)

    def _talk(self) -> None:
        is_last = False
        while not is_last:
            request = self._requests.get()
            if isinstance(request, StepRecord):
                self._held.append(request)
            self._hand_on()
            if not isinstance(request, StepRecord) and request["do"] == "close":
                is_last = True
                self._ask(request)
                self._count(missed=len(self._held))
            with self._changed:
                self._num_pending -= 1
                self._changed.notify_all()

    def _hand_on(self) -> None:
        # what could not be opened, a server that is down say, is tried again with every step, but
        # only once for all that came in the meantime
        if not self._is_open and self._requests.empty():
            is_open = self._ask(self._open_request)
            with self._changed:
                self._is_open = is_open
        if self._is_open:
            for record in self._held:
                request = WriteRequest(do="write", record=record_line(record).decode())
                self._count(missed=not self._ask(request))
            self._held.clear()

    def _count(self, *, missed: int) -> None:
        with self._changed:
            self._num_missed += missed

    def _ask(self, request: Request) -> bool:
        """One request and its answer; whether it was obeyed."""
        assert self._process.stdin is not None  # noqa: S101 - made with pipes
        assert self._process.stdout is not None  # noqa: S101
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            answer = b""
        if not answer.endswith(b"\n"):  # nothing, or what a kill cut off
            self._note(f"its process has ended; its last words are in {self._log}")
            return False
        problem = cast("Answer", json.loads(answer))["problem"]
        if problem:
            self._note(problem)
        return not problem

    def _note(self, problem: str) -> None:
        with self._changed:
            self._problem = self._problem or " ".join(problem.split())
