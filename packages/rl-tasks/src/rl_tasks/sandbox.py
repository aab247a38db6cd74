"""Running Python that nobody has read: in a process closed on every side, or not at all.

What is closed, and by what (Linux 5.14 or newer, x86_64 or aarch64):

===================  ==============================================================================
files of the caller  mount namespace: a root folder with the C library, Python's own library and
                     what `library_paths` names, all read-only; no ``/proc``, no ``/sys``, no
                     ``/home``. As root the code runs as user 65534
network              network namespace without any device, and no system call that makes a socket
other processes      process namespace; no ``ptrace``; ends when its caller does; whatever it
                     leaves behind is killed
environment          one variable, ``LANG``
memory               address space of each process, and their number
time                 wall time of the whole, CPU time of each process
files written        one folder in memory, of fixed size and number of files, gone afterwards
output               read up to a limit, then the code is killed
kernel               no new privileges, and a seccomp filter (`rl_tasks.seccomp`)
===================  ==============================================================================

Every one is required, and there is no setting that leaves one out: `check_sandbox` starts a program
that does nothing, and where an isolation cannot be had on a machine the error names it.
"""

import contextlib
import fcntl
import functools
import marshal
import os
import selectors
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict

import attrs

from rl_tasks.seccomp import seccomp_filter

_Ended = Literal["itself", "wall_time", "output"]

_FOLDER = "/sandbox"
_MAIN = "main.py"
_SETUP_S = 60.0
"""Seconds in which a sandbox must be closed; takes 0.05 on an idle machine."""
_END_S = 60.0
"""Seconds in which the kernel must have ended a killed sandbox."""
_MIB = 2**20
_MIN_KERNEL = (5, 14)


class Request(TypedDict):
    """What the launcher is told; the limits are those of `SandboxLimits`."""

    binds: list[str]
    """Files and folders that Python needs, as absolute paths."""
    hidden: list[str]
    """Folders in them that are shown empty."""
    libraries: list[str]
    """Folders of packages that the code may read."""
    links: list[tuple[str, str]]
    """Symbolic links to make: path and what it points to."""
    devices: list[str]
    files: dict[str, str]
    """Name to text, in the folder in which the code starts."""
    argv: list[str]
    folder: str
    folder_bytes: int
    memory_bytes: int
    cpu_s: int
    processes: int
    open_files: int
    seccomp: str
    """The filter's instructions, in hexadecimal."""


class SandboxUnavailableError(RuntimeError):
    """This machine cannot close a sandbox; the message names what is missing."""


class SandboxFailedError(RuntimeError):
    """A sandbox could not be started this time, although the machine can have them."""


@attrs.frozen(kw_only=True)
class SandboxLimits:
    """What code may use. At most `max_processes` times `memory_bytes`, plus `folder_bytes`."""

    wall_s: float = attrs.field(
        default=10.0, validator=[attrs.validators.gt(0.0), attrs.validators.le(86_400.0)]
    )
    """Seconds from the start of Python to the end of everything. Default: that of verl's
    ``prime_code.check_correctness``, which has them for all test cases together."""

    cpu_s: int = attrs.field(default=10, validator=attrs.validators.ge(1))
    """Seconds of CPU time for each process, all its threads together."""

    memory_bytes: int = attrs.field(default=512 * _MIB, validator=attrs.validators.ge(64 * _MIB))
    """Address space of each process, in bytes; Python itself needs about 30 MiB."""

    max_processes: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    """Processes and threads at the same time, the first included."""

    folder_bytes: int = attrs.field(default=16 * _MIB, validator=attrs.validators.ge(_MIB))
    """Size of the folder in which the code may write, in bytes; it counts as memory."""

    max_output_bytes: int = attrs.field(default=_MIB, validator=attrs.validators.ge(1))
    """Bytes of standard output; more ends the code."""

    max_open_files: int = attrs.field(default=64, validator=attrs.validators.ge(8))
    """Open files of each process."""

    def __attrs_post_init__(self) -> None:
        """Refuse a CPU limit that the wall clock always beats."""
        if self.cpu_s > self.wall_s * self.max_processes:
            message = (
                f"SandboxLimits: cpu_s = {self.cpu_s} can never be reached within wall_s = "
                f"{self.wall_s} by {self.max_processes} processes or threads; lower cpu_s"
            )
            raise ValueError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    """What a program did."""

    output: bytes
    """Its standard output, up to the limit."""

    ended: _Ended
    """Whether it ended, or which limit it was killed for."""

    exit_code: int
    """0 to 255; 128 and the signal's number if a signal ended it (152: CPU time)."""


def run_python(
    program: str,
    *,
    stdin: bytes,
    limits: SandboxLimits,
    files: Mapping[str, str] | None = None,
    library_paths: tuple[Path, ...] = (),
) -> ProgramResult:
    """Run a Python program in a sandbox of its own, and wait for it.

    The interpreter is this process's own, without any installed package but those in
    `library_paths`. Safe to call from several threads; the program is killed with its caller.

    Args:
        program: source text.
        stdin: what it reads.
        limits: what it may use.
        files: further files, name to text, in the folder in which it starts.
        library_paths: folders of Python packages that it may read and import.

    Raises:
        SandboxFailedError: if the sandbox could not be closed; the program did not run.
    """
    request: Request = {
        **_machine_part(),
        "libraries": [str(path.resolve()) for path in library_paths],
        "files": {**(files or {}), _MAIN: program},
        "argv": [_interpreter(), "-I", "-S", "-B", "-X", "utf8", "-c", _start(library_paths)],
        "folder_bytes": limits.folder_bytes,
        "memory_bytes": limits.memory_bytes,
        "cpu_s": limits.cpu_s,
        "processes": limits.max_processes,
        "open_files": limits.max_open_files,
    }
    try:
        return _run(request, stdin, limits)
    except OSError as error:
        message = f"the sandbox's launcher did not start: {error}"
        raise SandboxFailedError(message) from error


@functools.cache
def check_sandbox() -> None:
    """Start a program that does nothing; remembered for this process.

    Raises:
        SandboxUnavailableError: if it did not start closed; names the isolation that is missing.
    """
    missing = _missing_at_sight()
    if missing is None:
        try:
            result = run_python(
                "print('in')", stdin=b"", limits=SandboxLimits(wall_s=60.0, cpu_s=60)
            )
        except SandboxFailedError as error:
            missing = str(error)
        else:
            if result.output != b"in\n":
                missing = f"Python did not run inside: {result}"
    if missing is not None:
        message = (
            f"this machine cannot close a sandbox: {missing}. All of these are required: user, "
            "mount, process, network and IPC namespaces, read-only mounts, resource limits, "
            "seccomp. In a container allow user namespaces (its seccomp profile, and the sysctls "
            "user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns)"
        )
        raise SandboxUnavailableError(message)


def _run(request: Request, stdin: bytes, limits: SandboxLimits) -> ProgramResult:
    with contextlib.ExitStack() as stack:
        written = marshal.dumps(request)  # type: ignore[arg-type]  # a dict of plain values
        request_fd = stack.enter_context(_sealed("request", written))
        stdin_fd = stack.enter_context(_sealed("stdin", stdin))
        status_in, status_out = os.pipe()
        stack.callback(os.close, status_in)
        launcher = Path(__file__).with_name("sandbox_launcher.py")
        try:
            process = subprocess.Popen(  # noqa: S603 - this interpreter and a file of this package
                [
                    *(sys.executable, "-I", "-S", str(launcher)),
                    *(str(number) for number in (request_fd, status_out, os.getpid())),
                ],
                stdin=stdin_fd,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(request_fd, status_out),
                env={},
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the caller, who ends it or lets it end
            )
        finally:
            os.close(status_out)
        stack.enter_context(process)
        stack.callback(process.kill)  # also when this thread is interrupted
        return _watch(process, status_in, limits)


def _missing_at_sight() -> str | None:
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    system = os.uname()
    version = tuple(int(part) for part in system.release.split("-")[0].split(".")[:2])
    if version < _MIN_KERNEL:
        return f"it needs Linux 5.14 or newer for limits of processes, this is {system.release}"
    if system.machine not in {"x86_64", "aarch64"}:
        return f"seccomp filter: it needs x86_64 or aarch64, this is {system.machine}"
    return None


def _watch(
    process: "subprocess.Popen[bytes]", status_fd: int, limits: SandboxLimits
) -> ProgramResult:
    """Read the output until the end or a limit, and return when nothing of the sandbox is left."""
    assert process.stdout is not None  # noqa: S101 - for the type checker
    output_fd = process.stdout.fileno()
    watched = _Watched(deadline=time.monotonic() + _SETUP_S)
    ended = watched.read(output_fd, status_fd, limits)
    if ended == "itself":
        # standard output is closed; the program may still be running
        try:
            process.wait(max(0.0, watched.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            ended = "wall_time"
    process.kill()
    exit_code = process.wait()
    _wait_for_the_end(output_fd)
    if bytes(watched.status) != b"ready":
        said = watched.status.decode(errors="replace").removeprefix("ready").strip()
        message = said or f"the sandbox was not closed within {_SETUP_S} s, or its launcher died"
        raise SandboxFailedError(message)
    return ProgramResult(
        output=bytes(watched.output[: limits.max_output_bytes]),
        ended=ended,
        exit_code=exit_code if exit_code >= 0 else 128 - exit_code,
    )


@dataclass(kw_only=True, slots=True)
class _Watched:
    """What came out of a sandbox so far."""

    deadline: float
    output: bytearray = field(default_factory=bytearray)
    status: bytearray = field(default_factory=bytearray)

    def read(self, output_fd: int, status_fd: int, limits: SandboxLimits) -> _Ended:
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


def _start(library_paths: tuple[Path, ...]) -> str:
    """What Python runs first: the module `site` is left out, so what programs want of it is here.

    It would read the base installation's packages and run what their ``.pth`` files say.
    """
    paths = [str(path.resolve()) for path in library_paths]
    return (
        f"import builtins, sys; builtins.exit = builtins.quit = sys.exit; sys.path += {paths!r}; "
        f"__file__ = '{_FOLDER}/{_MAIN}'; sys.argv = [__file__]; "
        "exec(compile(open(__file__, 'rb').read(), __file__, 'exec'))"
    )


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


def _interpreter() -> str:
    return os.path.realpath(sys.executable)


def _packages() -> list[str]:
    """Folders of installed packages; links left out, since what they lead to is not there."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    named = [sysconfig.get_path(name, vars=base) for name in ("purelib", "platlib")]
    named += ["/usr/lib/python3/dist-packages", "/usr/local/lib/python3/dist-packages"]
    return sorted({os.path.realpath(path) for path in named if Path(path).is_dir()})


@functools.cache
def _machine_part() -> Request:
    """What is the same for every program on this machine."""
    binds = [_interpreter()]
    links: list[tuple[str, str]] = []
    for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        if Path(path).is_symlink():
            links.append((path, str(Path(path).readlink())))
        elif Path(path).is_dir():
            binds.append(path)
    if Path("/etc/ld.so.cache").is_file():
        binds.append("/etc/ld.so.cache")
    own = os.path.realpath(f"{sys.base_prefix}/lib")
    if not any(own == bind or own.startswith(f"{bind}/") for bind in binds):
        binds.append(own)
    return {
        "binds": binds,
        "hidden": [path for path in _packages() if any(path.startswith(f"{b}/") for b in binds)],
        "libraries": [],
        "links": links,
        "devices": ["/dev/null", "/dev/urandom"],
        "files": {},
        "argv": [],
        "folder": _FOLDER,
        "folder_bytes": 0,
        "memory_bytes": 0,
        "cpu_s": 0,
        "processes": 0,
        "open_files": 0,
        "seccomp": seccomp_filter(os.uname().machine).hex(),
    }
