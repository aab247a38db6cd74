"""Finding and ending the processes of one cluster, from the driver or from a guard beside it.

A process belongs to a cluster if it was started with the cluster's mark in its environment, or
if it has a file of the cluster's own folder open for writing; so no process of another run can be
meant. The mark alone would not do: ray and vLLM rename their processes, and the new name often
overwrites the environment that the kernel shows. Nor would parents and children: ray's main
process dies with the driver, and leaves its own as nobody's.

The guard waits until its standard input ends. If nothing came through it, the driver was killed or
could not clean up, and the guard ends the processes that are left and removes the folder. Ray by
itself takes about a minute to notice that its driver was killed (63 s with ray 2.60), in which a
resumed run would share CPUs and memory with the old one.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from async_policy.errors import ClusterError

CLUSTER_MARK = "ASYNC_POLICY_CLUSTER"
"""Environment variable that holds the mark."""

GUARD = "from async_policy.cluster_processes import main; main()"
"""Program of the guard."""

ALL_DONE = b"all done"
"""What the driver tells the guard when it has cleaned up itself."""

END_GRACE_S = 5.0
"""Seconds that processes have to end by themselves after ray's own shutdown."""

END_LIMIT_S = 15.0
"""Seconds after which a process that is still there, SIGKILL or not, is an error."""


def cluster_processes(mark: str, folder: Path, *, driver: int | None = None) -> list[int]:
    """Ids of the cluster's living processes, this one and the driver aside."""
    entry = f"{CLUSTER_MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        if int(path.name) in {os.getpid(), driver}:
            continue
        try:
            marked = entry in (path / "environ").read_bytes().split(b"\0")
            if marked or any(_writes_below(link, folder) for link in (path / "fd").iterdir()):
                found.append(int(path.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or belongs to somebody else
    return found


def end_processes(mark: str, folder: Path, *, grace_s: float, driver: int | None = None) -> None:
    """Wait until the cluster's processes have ended; kill those that are left after `grace_s`.

    The driver is not one of them, though it writes ray's logs: this process, or `driver`.

    Raises:
        ClusterError: if one is there after `END_LIMIT_S` seconds; names the processes.
    """
    start = time.monotonic()
    while processes := cluster_processes(mark, folder, driver=driver):
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
def guarded(
    mark: str, folder: Path, *, scratch: Path | None = None
) -> Iterator[Callable[[], None]]:
    """Have the guard end the cluster's processes and remove its folders if this process is killed.

    Yields:
        what to call once that has been done here; if it was not, the guard does it on the way out.

    Args:
        mark: of the cluster's processes.
        folder: the cluster's own.
        scratch: a folder that is of no use without the cluster.
    """
    # A session of its own: a Ctrl-C in the terminal is not for the guard.
    guard = subprocess.Popen(  # noqa: S603 -- a constant, run by this interpreter
        [sys.executable, "-c", GUARD, mark, str(folder), *([str(scratch)] if scratch else [])],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    last_words = b""

    def all_done() -> None:
        nonlocal last_words
        last_words = ALL_DONE

    try:
        yield all_done
    finally:
        # Not the context manager of Popen, which does not wait after a Ctrl-C.
        despite_interrupts(lambda: guard.communicate(last_words, timeout=2 * END_LIMIT_S))


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """No Ctrl-C for the seconds of a clean-up: a second one must not leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def despite_interrupts(clean_up: Callable[[], object]) -> None:
    """Clean up once and to the end, also if a second Ctrl-C arrives before it can be ignored.

    Raises:
        KeyboardInterrupt: afterwards, if one arrived.
    """
    done = False

    def once() -> None:
        nonlocal done
        if not done:
            clean_up()
            done = True

    try:
        with interrupts_ignored():
            once()
    except KeyboardInterrupt:  # before or after, never within
        with interrupts_ignored():
            once()
        raise


def main() -> None:
    """Be the guard."""
    mark, folder, *more = sys.argv[1:]
    driver = os.getppid()  # before it can be gone
    if sys.stdin.buffer.read() == ALL_DONE:
        return
    end_processes(mark, Path(folder), grace_s=0.0, driver=driver)
    for name in (folder, *more):
        if Path(name).exists():
            shutil.rmtree(name)


def _writes_below(link: Path, folder: Path) -> bool:
    """Whether an entry of ``/proc/*/fd`` is a file in the folder, open for writing."""
    return bool(link.lstat().st_mode & stat.S_IWUSR) and link.readlink().is_relative_to(folder)


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself
