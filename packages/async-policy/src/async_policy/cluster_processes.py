"""Finding and ending the processes of one cluster, from the driver or from a guard beside it.

Every process of a cluster, and whatever it starts, carries a mark in the environment it was
started with; so no process of another run can be meant.

Run as ``python -m async_policy.cluster_processes MARK FOLDER`` this is the guard: it waits until
its standard input ends, which happens when the driver is done or was killed, ends the processes
that are left and removes the folder. Ray by itself takes about a minute to notice that its driver
was killed (63 s with ray 2.60), in which a resumed run would share CPUs and memory with the old
one.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from async_policy.errors import ClusterError

CLUSTER_MARK = "ASYNC_POLICY_CLUSTER"
"""Environment variable that holds the mark."""

END_GRACE_S = 5.0
"""Seconds that processes have to end by themselves after ray's own shutdown."""

END_LIMIT_S = 15.0
"""Seconds after which a process that is still there, SIGKILL or not, is an error."""


def marked_processes(mark: str) -> list[int]:
    """Ids of the processes that were started with the mark, directly or by one another."""
    entry = f"{CLUSTER_MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or belongs to somebody else
        if entry in variables:
            found.append(int(path.parent.name))
    return found


def end_processes(mark: str, *, grace_s: float) -> None:
    """Wait until the marked processes have ended; kill those that are left after `grace_s`.

    Raises:
        ClusterError: if one is there after `END_LIMIT_S` seconds; names the processes.
    """
    start = time.monotonic()
    while processes := marked_processes(mark):
        waited = time.monotonic() - start
        if waited > END_LIMIT_S:
            message = (
                f"waited {waited:.0f} s for processes {processes} of the cluster to end, "
                f"SIGKILL included"
            )
            raise ClusterError(message)
        if waited >= grace_s:
            for process in processes:
                _kill(process)
        time.sleep(0.05)


@contextmanager
def guarded(mark: str, folder: Path) -> Iterator[None]:
    """Have the guard end the marked processes and remove `folder` if this process is killed."""
    # A session of its own: a Ctrl-C in the terminal is not for the guard.
    with subprocess.Popen(  # noqa: S603 -- this module, run by this interpreter
        [sys.executable, "-m", "async_policy.cluster_processes", mark, str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    ):
        yield


def main() -> None:
    """Be the guard."""
    mark, folder = sys.argv[1], Path(sys.argv[2])
    sys.stdin.buffer.read()
    end_processes(mark, grace_s=0.0)
    if folder.exists():
        shutil.rmtree(folder)


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself


if __name__ == "__main__":
    main()
