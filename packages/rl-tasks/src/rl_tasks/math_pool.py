"""Worker processes for comparisons that need algebra, each comparison with a real time limit.

They are started as programs of their own and not through `multiprocessing`: that would run the
caller's main module again in each of them, and a training script's takes long and may claim a GPU.
"""

import atexit
import functools
import importlib.util
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from typing import final

_START_S = 300.0
"""Seconds in which a worker must have loaded its libraries; takes 2 on an idle machine."""

_MAX_REPLY = 1 << 16


class WorkerDiedError(RuntimeError):
    """A worker ended in the middle of a comparison."""


class ComparisonFailedError(RuntimeError):
    """A comparison raised; the message is the name of the exception."""


def equal_by_algebra(
    answer: str, ground_truth: str, percent: str, *, timeout_s: float, num_workers: int
) -> bool:
    """Whether two answers are equal, decided in a worker; what was decided is remembered.

    The samples of a prompt often have the same answer. A time-out is not remembered: it may have
    been the machine's fault.

    Raises:
        TimeoutError: after `timeout_s` seconds of comparing; the worker is killed.
        WorkerDiedError: if the worker ended, as when its memory was used up.
        ComparisonFailedError: if the comparison raised.
        ModuleNotFoundError: without math-verify; names the extra.
    """
    # samples of a prompt are graded at the same time: the second of two equal ones waits
    with _LOCKS[hash((answer, ground_truth)) % len(_LOCKS)]:
        return _decided(answer, ground_truth, percent, timeout_s, num_workers)


_LOCKS = [threading.Lock() for _ in range(256)]


def _release_after_fork() -> None:
    """What another thread held at a fork, nobody would ever release in the child."""
    _LOCKS[:] = [threading.Lock() for _ in _LOCKS]


os.register_at_fork(after_in_child=_release_after_fork)


@functools.lru_cache(maxsize=1 << 16)
def _decided(
    answer: str, ground_truth: str, percent: str, timeout_s: float, num_workers: int
) -> bool:
    pool = _pool(num_workers, os.getpid())
    request: dict[str, str | float] = {
        "answer": answer,
        "ground_truth": ground_truth,
        "percent": percent,
        "timeout_s": timeout_s,
    }
    reply = pool.ask(request, timeout_s=timeout_s)
    if "error" in reply:
        raise ComparisonFailedError(str(reply["error"]))
    return reply["equal"] is True


@functools.cache
def _pool(num_workers: int, pid: int) -> "_Pool":
    """One pool for each process: a fork must not share its parent's pipes."""
    del pid
    if importlib.util.find_spec("math_verify") is None:
        message = "MathAnswer needs math-verify; install rl-tasks[math]"
        raise ModuleNotFoundError(message)
    pool = _Pool(num_workers)
    atexit.register(pool.end)
    return pool


@final
class _Pool:
    """A number of places for workers, which are started when the running ones are all busy."""

    def __init__(self, num_workers: int) -> None:
        self._places: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._workers: list[_Worker] = []
        for _ in range(num_workers):
            self._places.put(None)

    def ask(self, request: dict[str, str | float], *, timeout_s: float) -> dict[str, object]:
        """Wait for a free worker, and for its reply."""
        worker = self._places.get()
        try:
            if worker is None:
                worker = _Worker()
                self._workers.append(worker)
            return worker.ask(request, timeout_s=timeout_s)
        except BaseException:
            if worker is not None:
                worker.end()
                self._workers.remove(worker)
                worker = None
            raise
        finally:
            self._places.put(worker)

    def end(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.end()


@final
class _Worker:
    """One process, ready to compare."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            # -P: no module of the folder where the run was started stands in a library's way
            [sys.executable, "-P", "-m", "rl_tasks.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the run, which may want its answers graded
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            self._reply(_START_S)
        except BaseException:
            self.end()
            raise

    def ask(self, request: dict[str, str | float], *, timeout_s: float) -> dict[str, object]:
        assert self._process.stdin is not None  # noqa: S101 - for the type checker
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError as error:
            raise WorkerDiedError from error
        return self._reply(timeout_s)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _reply(self, timeout_s: float) -> dict[str, object]:
        assert self._process.stdout is not None  # noqa: S101 - for the type checker
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        line = b""
        poll = select.poll()  # unlike select, also for descriptors above 1023
        poll.register(descriptor, select.POLLIN)
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            chunk = os.read(descriptor, _MAX_REPLY)
            if not chunk:
                raise WorkerDiedError
            line += chunk
        reply: dict[str, object] = json.loads(line)
        return reply
