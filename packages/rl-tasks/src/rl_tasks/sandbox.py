"""Running Python that nobody has read: in a process closed on every side, or not at all.

What is closed, and by what (Linux 5.14 or newer, x86_64 or aarch64):

===================  ==============================================================================
files of the caller  mount namespace: a root folder with the C library, Python's own library and
                     what `library_paths` names, all read-only; no ``/proc``, no ``/sys``, no
                     ``/home``. As root the code runs as user 65534
network              network namespace without any device, and no system call that makes a socket
other processes      process namespace and session of its own; no ``ptrace``; ends when its caller
                     does; whatever it leaves behind is killed
other programs       user, process, mount and IPC namespaces for each, and memory that is a copy of
                     a process which runs one program at a time and never reads any
environment          one variable, ``LANG``
memory               address space of each process, and their number
time                 wall time of the whole, CPU time of each process
files written        one folder in memory, of fixed size and number of files, gone afterwards
output               read up to a limit, then the code is killed
kernel               no capability, no new privileges, and a seccomp filter (`rl_tasks.seccomp`)
===================  ==============================================================================

A program is no start of Python but a copy of a started one (`rl_tasks.sandbox_launcher`), which
costs a fifth. It ends as with ``python``, but for what the interpreter does to itself at its end;
programs of one such process have the seed of hashes in common.

Every one is required, and there is no setting that leaves one out: `check_sandbox` starts a program
that does nothing, and where an isolation cannot be had on a machine the error names it.
"""

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rl_tasks.sandbox_limits import (
    ProgramResult,
    SandboxFailedError,
    SandboxLimits,
    SandboxUnavailableError,
)
from rl_tasks.sandbox_machine import MAIN
from rl_tasks.sandbox_pool import run_program

_MIN_KERNEL = (5, 14)


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
    A process that waits for the next program is kept for each call that runs at the same time.

    Args:
        program: source text.
        stdin: what it reads.
        limits: what it may use.
        files: further files, name to text, in the folder in which it starts.
        library_paths: folders of Python packages that it may read and import.

    Raises:
        SandboxFailedError: if the sandbox could not be closed; the program did not run.
    """
    everything = {**(files or {}), MAIN: program}
    libraries = tuple(str(path.resolve()) for path in library_paths)
    return run_program(everything, stdin, limits, libraries)


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
