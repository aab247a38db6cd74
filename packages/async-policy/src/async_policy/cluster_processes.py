"""Finding and ending the processes of one cluster, from the driver or from a guard beside it.

A process belongs to a cluster if it was started with the cluster's mark in its environment, if
its output goes into the cluster's own folder, or if one of its ancestors does so; so no process
of another run can be meant. None of the three alone finds all: ray and vLLM rename their
processes, and the new name sometimes overwrites the environment that the kernel shows; ray's
agents write elsewhere; and a process whose parent has died is nobody's descendant.

The guard waits until its standard input ends, which happens when the driver is done or was
killed, then ends the processes that are left and removes the folder. Ray by itself takes about a
minute to notice that its driver was killed (63 s with ray 2.60), in which a resumed run would
share CPUs and memory with the old one.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from async_policy.errors import ClusterError

CLUSTER_MARK = "ASYNC_POLICY_CLUSTER"
"""Environment variable that holds the mark."""

STATE_FIELD, PARENT_FIELD, START_FIELD = 0, 1, 19
"""Places in ``/proc/*/stat`` behind the name (proc_pid_stat(5): fields 3, 4 and 22)."""

GUARD = "from async_policy.cluster_processes import main; main()"
"""Program of the guard."""

END_GRACE_S = 5.0
"""Seconds that processes have to end by themselves after ray's own shutdown."""

END_LIMIT_S = 15.0
"""Seconds after which a process that is still there, SIGKILL or not, is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process; ids are used again, so the time of its start belongs to its identity."""

    number: int
    """The kernel's id."""

    started: str
    """Start, in the kernel's clock ticks since boot."""


def cluster_processes(mark: str, folder: Path) -> set[Process]:
    """The living processes of the cluster."""
    entry = f"{CLUSTER_MARK}={mark}".encode()
    found: set[Process] = set()
    children: dict[int, list[Process]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = _stat_fields(path)
            process = Process(number=int(path.name), started=fields[START_FIELD])
            children.setdefault(int(fields[PARENT_FIELD]), []).append(process)
            marked = entry in (path / "environ").read_bytes().split(b"\0")
            if marked or any(_is_below(path / "fd" / number, folder) for number in "12"):
                found.add(process)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or belongs to somebody else
    unvisited = list(found)
    while unvisited:
        below = children.get(unvisited.pop().number, [])
        unvisited.extend(process for process in below if process not in found)
        found.update(below)
    return {process for process in found if _is_alive(process)}


def end_processes(mark: str, folder: Path, *, known: Set[Process], grace_s: float) -> None:
    """Wait until the cluster's processes have ended; kill those that are left after `grace_s`.

    Args:
        mark: the cluster's mark.
        folder: the cluster's folder.
        known: processes found earlier, whose parents may have ended since.
        grace_s: seconds to let them end by themselves.

    Raises:
        ClusterError: if one is there after `END_LIMIT_S` seconds; names the processes.
    """
    start = time.monotonic()
    processes = cluster_processes(mark, folder) | known
    while processes := {process for process in processes if _is_alive(process)}:
        waited = time.monotonic() - start
        if waited > END_LIMIT_S:
            numbers = sorted(process.number for process in processes)
            message = (
                f"waited {waited:.0f} s for processes {numbers} of the cluster to end, "
                f"SIGKILL included"
            )
            raise ClusterError(message)
        if waited >= grace_s:
            for process in processes:
                _kill(process)
        time.sleep(0.05)
        processes |= cluster_processes(mark, folder)


@contextmanager
def guarded(mark: str, folder: Path) -> Iterator[None]:
    """Have the guard end the cluster's processes and remove `folder` if this process is killed."""
    # A session of its own: a Ctrl-C in the terminal is not for the guard.
    with subprocess.Popen(  # noqa: S603 -- a constant, run by this interpreter
        [sys.executable, "-c", GUARD, mark, str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    ):
        yield


def main() -> None:
    """Be the guard."""
    mark, folder = sys.argv[1], Path(sys.argv[2])
    sys.stdin.buffer.read()
    end_processes(mark, folder, known=frozenset(), grace_s=0.0)
    if folder.exists():
        shutil.rmtree(folder)


def _stat_fields(path: Path) -> list[str]:
    """Fields of a process's ``stat`` behind its name, which may hold anything."""
    return (path / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _is_below(link: Path, folder: Path) -> bool:
    """Whether an open file of a process is in the folder."""
    return link.is_symlink() and link.readlink().is_relative_to(folder)


def _is_alive(process: Process) -> bool:
    """Whether it exists and is no zombie, which only waits for its parent to ask."""
    try:
        fields = _stat_fields(Path("/proc") / str(process.number))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[START_FIELD] == process.started and fields[STATE_FIELD] not in "ZX"


def _kill(process: Process) -> None:
    try:
        os.kill(process.number, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself
