"""The processes in which sandboxes wait for programs, and the way of a program through one.

A launcher (`rl_tasks.sandbox_launcher`) takes some 50 ms of a core to start and then runs one
program after the other. One that had to be killed together with its program, or that said anything
unexpected, is not used again. They are started when the running ones are all busy.
"""

import atexit
import contextlib
import fcntl
import marshal
import os
import queue
import selectors
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, final

from rl_tasks.sandbox_limits import Ended, ProgramResult, SandboxFailedError, SandboxLimits
from rl_tasks.sandbox_machine import interpreter, sandbox_machine

_SETUP_S = 60.0
"""Seconds in which a sandbox must be closed; takes 0.05 on an idle machine."""
_END_S = 60.0
"""Seconds in which the kernel must have ended a killed sandbox."""
_MAX_IDLE = 32
"""Launchers that are kept; each takes some 10 MiB."""

_START = """\
import sys, types
package = types.ModuleType("rl_tasks")
package.__path__ = [sys.argv.pop(1)]
sys.modules["rl_tasks"] = package
from rl_tasks.sandbox_launcher import run
run()
"""
"""Loads the launcher without the rest of its package, which is not on the path."""


class Program(TypedDict):
    """What a program's first process is told; the limits are those of `SandboxLimits`."""

    files: dict[str, bytes]
    """Name to content, in the folder in which the program starts."""
    folder_bytes: int
    memory_bytes: int
    cpu_s: int
    processes: int
    open_files: int


class _LauncherGoneError(Exception):
    """A launcher that was idle between two programs has ended; nothing was run."""


def run_program(
    files: Mapping[str, str], stdin: bytes, limits: SandboxLimits, libraries: tuple[str, ...]
) -> ProgramResult:
    """Run one program, and return when nothing of it is left.

    Args:
        files: name to text; `rl_tasks.sandbox_machine.MAIN` is the program.
        stdin: what it reads.
        limits: what it may use.
        libraries: absolute paths of folders of packages.

    Raises:
        SandboxFailedError: if the sandbox could not be closed; the program did not run.
    """
    program: Program = {
        "files": {name: text.encode(errors="surrogatepass") for name, text in files.items()},
        "folder_bytes": limits.folder_bytes,
        "memory_bytes": limits.memory_bytes,
        "cpu_s": limits.cpu_s,
        "processes": limits.max_processes,
        "open_files": limits.max_open_files,
    }
    pool = _pool(libraries, os.getpid())
    while True:
        launcher = pool.take()
        try:
            result = launcher.run(program, stdin, limits)
        except _LauncherGoneError:
            launcher.end()
        except BaseException:  # also when this thread is interrupted
            launcher.end()
            raise
        else:
            pool.give_back(launcher)
            return result


_pools: "dict[tuple[tuple[str, ...], int], _Pool]" = {}


def _pool(libraries: tuple[str, ...], pid: int) -> "_Pool":
    """One pool for each process: a fork must not share its parent's sockets.

    Of several threads that make the first one, one wins. There is no lock, which another thread
    could hold while this process is forked.
    """
    pool = _pools.get((libraries, pid))
    if pool is None:
        made = _Pool(libraries)
        pool = _pools.setdefault((libraries, pid), made)
        if pool is made:
            atexit.register(pool.end)
    return pool


@final
class _Pool:
    """Launchers that wait for a program, the one used last on top."""

    def __init__(self, libraries: tuple[str, ...]) -> None:
        self._libraries = libraries
        self._idle: queue.LifoQueue[_Launcher] = queue.LifoQueue(_MAX_IDLE)

    def take(self) -> "_Launcher":
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return _Launcher(self._libraries)

    def give_back(self, launcher: "_Launcher") -> None:
        """Keep it for the next program, if it is as it was before the first."""
        if launcher.usable:
            with contextlib.suppress(queue.Full):
                self._idle.put_nowait(launcher)
                return
        launcher.end()

    def end(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().end()


@final
class _Launcher:
    """One process that has closed a sandbox around itself and runs programs in copies of it."""

    def __init__(self, libraries: tuple[str, ...]) -> None:
        self.usable = True
        self._has_run = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        machine = sandbox_machine(libraries)
        with theirs, _sealed("machine", marshal.dumps(machine)) as machine_fd:  # type: ignore[arg-type]  # a dict of plain values
            try:
                self._process = self._started(machine_fd, theirs.fileno())
            except OSError as error:
                self._control.close()
                message = f"the sandbox's launcher did not start: {error}"
                raise SandboxFailedError(message) from error
        try:
            self._wait_until_closed()
        except BaseException:
            self.end()
            raise

    @staticmethod
    def _started(machine_fd: int, control_fd: int) -> "subprocess.Popen[bytes]":
        with _sealed("nothing", b"") as nothing_fd:
            return subprocess.Popen(  # noqa: S603 - this interpreter and a file of this package
                [
                    *(interpreter(), "-I", "-S", "-B", "-X", "utf8", "-c", _START),
                    str(Path(__file__).parent),
                    *(str(number) for number in (machine_fd, control_fd, os.getpid())),
                ],
                # what programs get later is of the same kinds: a file in memory and a pipe
                stdin=nothing_fd,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(machine_fd, control_fd),
                env={"LANG": "C.UTF-8"},
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the caller, who ends it or lets it end
            )

    def _wait_until_closed(self) -> None:
        said = _said(self._process, time.monotonic() + _SETUP_S)
        if said != b"ready":
            message = said.decode(errors="replace").strip()
            raise SandboxFailedError(message or _NOT_CLOSED)

    def run(self, program: Program, stdin: bytes, limits: SandboxLimits) -> ProgramResult:
        """Run one program, and return when nothing of it is left.

        Raises:
            SandboxFailedError: if the sandbox could not be closed; the program did not run.
            _LauncherGoneError: if this process has ended while it waited for a second or later one.
        """
        self.usable = False
        try:
            output_fd, status_fd = self._begin(program, stdin)
        except OSError as error:
            message = f"the sandbox's launcher was given no program: {error}"
            raise SandboxFailedError(message) from error
        try:
            return self._watch(output_fd, status_fd, limits)
        finally:
            os.close(output_fd)
            os.close(status_fd)

    def _begin(self, program: Program, stdin: bytes) -> tuple[int, int]:
        """Send a program; returns the reading ends of its output and of its status."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            request = marshal.dumps(program)  # type: ignore[arg-type]  # a dict of plain values
            request_fd = theirs.enter_context(_sealed("request", request))
            stdin_fd = theirs.enter_context(_sealed("stdin", stdin))
            output_fd, output_in = os.pipe()
            ours.callback(os.close, output_fd)
            theirs.callback(os.close, output_in)
            status_fd, status_in = os.pipe()
            ours.callback(os.close, status_fd)
            theirs.callback(os.close, status_in)
            self._control.settimeout(_SETUP_S)
            try:
                socket.send_fds(self._control, [b"p"], [request_fd, stdin_fd, output_in, status_in])
            except (BrokenPipeError, ConnectionResetError) as error:
                if not self._has_run:
                    raise  # the next new one might be no better
                raise _LauncherGoneError from error
            ours.pop_all()
        return output_fd, status_fd

    def _watch(self, output_fd: int, status_fd: int, limits: SandboxLimits) -> ProgramResult:
        watched = _Watched(deadline=time.monotonic() + _SETUP_S)
        ended = watched.read(output_fd, status_fd, limits)
        exit_code = None
        if ended == "itself":
            # standard output is closed; the program may still be running
            self._control.settimeout(max(0.001, watched.deadline - time.monotonic()))
            try:
                exit_code = self._exit_code()
            except TimeoutError:
                ended = "wall_time"
        if exit_code is None:
            self.end()
            _wait_for_the_end(output_fd)
        if ended == "itself" and not watched.status and self._has_run:
            raise _LauncherGoneError  # before the program began
        if bytes(watched.status) != b"ready":
            said = watched.status.decode(errors="replace").removeprefix("ready").strip()
            raise SandboxFailedError(said or _NOT_CLOSED)
        if ended == "itself" and exit_code is None:
            message = "the sandbox's launcher ended, and the program with it"
            raise SandboxFailedError(message)
        self.usable, self._has_run = ended == "itself", True
        return ProgramResult(
            output=bytes(watched.output[: limits.max_output_bytes]),
            ended=ended,
            exit_code=_KILLED if exit_code is None else exit_code,
        )

    def _exit_code(self) -> int | None:
        """What the launcher says of the program's end; None if there is no launcher any more."""
        try:
            said = self._control.recv(16)
        except ConnectionResetError:
            return None
        return int(said) if said else None

    def end(self) -> None:
        """Kill it, and with it what it runs."""
        self.usable = False
        self._process.kill()
        self._process.wait()
        self._control.close()
        if self._process.stdout is not None:
            self._process.stdout.close()


_KILLED = 128 + 9
_NOT_CLOSED = f"the sandbox was not closed within {_SETUP_S} s, or its launcher died"


def _said(process: "subprocess.Popen[bytes]", deadline: float) -> bytes:
    """What a launcher writes at its start, up to ``ready`` or its end."""
    assert process.stdout is not None  # noqa: S101 - for the type checker
    said = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while said != b"ready" and selector.select(max(0.0, deadline - time.monotonic())):
            chunk = os.read(process.stdout.fileno(), 1 << 12)
            if not chunk:
                break
            said += chunk
    return bytes(said)


@dataclass(kw_only=True, slots=True)
class _Watched:
    """What came out of a sandbox so far."""

    deadline: float
    output: bytearray = field(default_factory=bytearray)
    status: bytearray = field(default_factory=bytearray)

    def read(self, output_fd: int, status_fd: int, limits: SandboxLimits) -> Ended:
        """Read both pipes to their ends, or up to a limit."""
        with selectors.DefaultSelector() as selector:
            selector.register(output_fd, selectors.EVENT_READ, self.output)
            selector.register(status_fd, selectors.EVENT_READ, self.status)
            while selector.get_map():
                ready = selector.select(max(0.0, self.deadline - time.monotonic()))
                if not ready or time.monotonic() > self.deadline:
                    return "wall_time"
                for key, _ in ready:
                    chunk = os.read(key.fd, 1 << 16)
                    if not chunk:
                        selector.unregister(key.fd)
                    elif key.fd == status_fd and not self.status:
                        # "ready" in one write: the program starts now
                        self.deadline = time.monotonic() + limits.wall_s
                    key.data.extend(chunk)
                if len(self.output) > limits.max_output_bytes:
                    return "output"
        return "itself"


def _wait_for_the_end(output_fd: int) -> None:
    """Read until every process that could write has gone; the kernel is killing them."""
    deadline = time.monotonic() + _END_S
    with selectors.DefaultSelector() as selector:
        selector.register(output_fd, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            if not os.read(output_fd, 1 << 16):
                return
    message = f"a killed sandbox was not gone after {_END_S} s"
    raise SandboxFailedError(message)


@contextlib.contextmanager
def _sealed(name: str, content: bytes) -> Iterator[int]:
    """A file in memory that nobody can change any more, read from its start."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
