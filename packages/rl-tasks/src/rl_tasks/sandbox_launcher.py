"""The process that closes a sandbox around itself, and of which every tried program is a copy.

Started by `rl_tasks.sandbox_pool` (``python -I -S -B -X utf8``), with the standard library alone.
It is told what the machine has once, and then waits for programs, one after the other::

    machine ──▶ namespaces ──▶ a root folder of read-only libraries ──▶ waits, with modules loaded
                                                                          │ copy
    program ──▶ namespaces of its own, first process inside: a folder ◀───┘
                in memory, no capabilities, waits ──copy──▶ limits, seccomp, the program

A start of Python takes 10 ms of a core, a copy of a started one less than 1 ms. What copies have in
common is what none of them can change: the read-only root folder, a network namespace without any
device, and this process's memory as it was before the first program. It never reads a program, only
descriptors pass through it, so nothing of one is in the memory that the next is a copy of. It runs
one at a time, and goes on when the kernel has ended all processes of it.

Every step either succeeds or is written to a status pipe by name, and nothing runs: the pipe says
``ready`` only if the program is about to start with every isolation in place.
"""

# Whatever is imported here is in the memory of every program.
# ruff: noqa: PTH123

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import marshal
import os
import resource
import select
import socket
import sys
import types
from typing import NamedTuple

from rl_tasks.sandbox_kernel import (
    StepError,
    SystemCallFilter,
    close_from,
    close_sandbox,
    drop_capabilities,
    end_with_parent,
    fork_into_namespaces,
    map_user,
    mount_tmpfs,
    open_process,
    require_own_memory,
    set_interrupt_handler,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from rl_tasks.sandbox_machine import Machine
    from rl_tasks.sandbox_pool import Program

_SETUP_FAILED = 125
_NOT_FLUSHED = 120
"""Python's own exit code where its standard output could not be written."""
_INTERRUPTED = 128 + 2

_LOADED = (
    *("bisect", "collections", "copy", "functools", "heapq", "io", "itertools", "json", "math"),
    *("operator", "random", "re", "string", "typing"),
)
"""What programs usually import, loaded before the first of them."""


class _Closed(NamedTuple):
    """What the processes of a program need of the one that they are copies of."""

    folder: str
    proc: int
    """Descriptor of ``/proc``."""
    alive: int
    """Reading end of a pipe that hangs up when the launcher ends."""
    uid: int
    gid: int
    system_calls: SystemCallFilter


def run() -> NoReturn:
    """Close the sandbox and serve; then, in the process of a program, run it as Python would."""
    machine_fd, control_fd, caller = map(int, sys.argv[1:])
    os.umask(0o022)
    try:
        with open(machine_fd, "rb") as file:
            machine: Machine = marshal.loads(file.read())  # noqa: S302 - written by the caller
        caller_fd = open_process(caller)
        # it may have ended before the descriptor was made
        _require("its caller", alive=os.getppid() == caller)
        # out of reach once the root folder has changed, and needed for the maps of users
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        close_sandbox(machine, proc)
        _load(machine)
        require_own_memory(proc)
        control = socket.socket(fileno=control_fd)
        os.write(1, b"ready")
    except BaseException as error:  # noqa: BLE001 - reported by name
        _report(1, error)
    _serve(machine, proc, control, caller_fd)
    _run_main(f"{machine['folder']}/{machine['main']}")


def _load(machine: Machine) -> None:
    """What is the same for all programs, so that their copies begin with it."""
    for name in ("exit", "quit"):
        setattr(builtins, name, sys.exit)  # of the module `site`, which is left out
    sys.path += machine["libraries"]
    for name in _LOADED:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rl_tasks"]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()  # a collection would write to, and so copy, all memory that is shared until then


def _serve(machine: Machine, proc: int, control: socket.socket, caller: int) -> None:
    """Wait for programs and their ends. Returns in the process of a program, with all in place.

    A program arrives as four descriptors; what is sent back is its exit code.
    """
    alive, held = os.pipe()
    closed = _Closed(
        folder=machine["folder"],
        proc=proc,
        alive=alive,
        uid=os.getuid(),
        gid=os.getgid(),
        system_calls=SystemCallFilter(machine["seccomp"]),
    )
    while True:
        files: list[int] = []
        if _first_ready(caller, control.fileno()) != caller:
            _, files, _, _ = socket.recv_fds(control, 1, 4)
        if not files:
            os._exit(0)  # nobody wants any more of this process
        try:
            first = fork_into_namespaces()
        except StepError as error:
            _report(files[3], error)
        if first == 0:
            os.close(held)
            control.detach()  # its descriptor will be closed, and its number may be a file's then
            _become_program(closed, files)
            return
        for descriptor in files:
            os.close(descriptor)
        ended_fd = open_process(first)
        if _first_ready(ended_fd, control.fileno(), caller) != ended_fd:
            os._exit(0)  # the caller has gone; this ends the program
        os.close(ended_fd)
        _, ended = os.waitpid(first, 0)
        control.send(b"%d" % _code_of(ended))


def _become_program(closed: _Closed, files: list[int]) -> None:
    """In the first process inside: start the program's and wait for it alone. Returns in that one.

    Whatever else is left when the program ends dies with the first process. That one does no more
    than it must: every page of memory that it writes to is copied one time more.
    """
    try:
        end_with_parent()
        # it may have been killed before that
        _require("its launcher", alive=not select.select([closed.alive], [], [], 0)[0])
        os.setsid()  # a signal to the program's whole group stays inside
        # nothing inside can interrupt it: the kernel keeps signals without a handler from it
        handler = set_interrupt_handler(None)
        code = os.fork()
        if code == 0:
            set_interrupt_handler(handler)
            _close(closed, files)
            return
        close_from(0)
    except BaseException as error:  # noqa: BLE001 - reported by name
        _report(files[3], error)
    while True:
        pid, ended = os.waitpid(-1, 0)
        if pid == code:
            os._exit(_code_of(ended))


def _close(closed: _Closed, files: list[int]) -> None:
    """In the program's process: a folder of its own, its input and output, and no way back."""
    request, stdin, stdout, status = files
    content = os.read(request, os.fstat(request).st_size)
    program: Program = marshal.loads(content)  # noqa: S302 - written by the caller
    map_user(closed.proc, closed.uid, closed.gid)
    mount_tmpfs(closed.folder, program["folder_bytes"])
    os.chdir(closed.folder)
    for name, content in program["files"].items():
        written = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        while content:
            content = content[os.write(written, content) :]  # noqa: PLW2901
        os.close(written)
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    # the launcher's is one open file for all programs, and flags are an open file's
    os.dup2(os.open("/dev/null", os.O_RDWR), 2)
    os.dup2(status, 3)
    files[3] = 3
    close_from(4)
    drop_capabilities()
    _limit(program)
    closed.system_calls.install()
    os.write(3, b"ready")
    os.close(3)


def _limit(program: Program) -> None:
    for limit, value in (
        (resource.RLIMIT_AS, program["memory_bytes"]),
        (resource.RLIMIT_FSIZE, program["folder_bytes"]),
        (resource.RLIMIT_NOFILE, program["open_files"]),
        # of this user in this user namespace (Linux 5.14), where the first process is one as well
        (resource.RLIMIT_NPROC, program["processes"] + 1),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    # SIGXCPU first, so that the exit code tells; SIGKILL for those who ignore it
    resource.setrlimit(resource.RLIMIT_CPU, (program["cpu_s"], program["cpu_s"] + 1))


def _run_main(path: str) -> NoReturn:
    """Run a file as ``python path`` does, up to what Python does at its end.

    But for taking down the interpreter, which costs more than everything before.
    """
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins, __cached__=None, __file__=path)
    sys.modules["__main__"] = main
    sys.argv = [path]
    sys.orig_argv = [sys.executable, path]
    code = 0
    try:
        with open(path, "rb") as file:
            source = file.read()
        # the program itself, in the process that was closed for it
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:  # noqa: BLE001 - Python's last resort as well
        sys.excepthook(type(error), error, error.__traceback__)
        code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # noqa: SLF001 - waits for threads, as Python does
    atexit._run_exitfuncs()  # noqa: SLF001
    flushed = _flush()
    sys.modules.pop("__main__", None)
    del main
    gc.collect()  # files that it left open are written now
    os._exit(code if _flush() and flushed else _NOT_FLUSHED)


def _flush() -> bool:
    flushed = True
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception:  # noqa: BLE001 - the program may have put anything there
            flushed = False
    return flushed


def _exit_code(value: object) -> int:
    """Of ``sys.exit(value)``: text goes to standard error, which nobody reads, and is 1."""
    if value is None:
        return 0
    if not isinstance(value, int):
        return 1
    return value & 0xFF if abs(value) < 1 << 63 else 0xFF


def _code_of(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _report(status: int, error: BaseException) -> NoReturn:
    text = str(error) if isinstance(error, StepError) else f"{type(error).__name__}: {error}"
    os.write(status, f"\n{text}".encode(errors="replace"))
    os._exit(_SETUP_FAILED)


def _require(who: str, *, alive: bool) -> None:
    if not alive:
        raise StepError(f"{who} has ended")


def _first_ready(*descriptors: int) -> int:
    """Wait for some descriptors; the first of those that are ready, or whose other end is gone."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll()}
    return next(descriptor for descriptor in descriptors if descriptor in ready)
