"""Programs that attack their caller and their machine."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_tasks import (
    ProgramResult,
    SandboxLimits,
    run_python,
)

pytestmark = pytest.mark.usefixtures("needs_sandbox")


def run(program: str, stdin: bytes = b"", **limits: float) -> ProgramResult:
    settings: dict[str, float] = {"wall_s": 60.0, "cpu_s": 60, **limits}
    return run_python(program, stdin=stdin, limits=SandboxLimits(**settings))  # type: ignore[arg-type]


def test_nothing_of_the_caller_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither files nor environment nor processes: the sandbox holds libraries and one folder."""
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o644)
    program = f"""\
import glob, os
for path in ({str(secret)!r}, "/etc/passwd", "/proc/1/environ", "/proc/self/environ", "/root/.ssh",
             "/old/etc/passwd", "../etc/passwd", {__file__!r}):
    try:
        print(open(path).read())
    except OSError:
        pass
print(sorted(os.environ.items()))
print(sorted(os.listdir("/sandbox")), [name for name in glob.glob("/*/*") if "hunter" in name])
print(os.path.exists("/proc"), os.path.exists("/sys"), os.path.exists("/home"))
for descriptor in range(3, 100):
    try:
        os.fstat(descriptor)
        print("open", descriptor)
    except OSError:
        pass
try:
    os.listdir("/proc/self/fd")
except OSError:
    print("end")
"""
    output = run(program).output.decode()
    assert output == "[('LANG', 'C.UTF-8')]\n['main.py'] []\nFalse False False\nend\n"


def test_no_installed_package_is_there() -> None:
    """The base installation's packages are hidden and its .pth files not run; exit is there."""
    program = """\
import os, sys, sysconfig
for name in ("purelib", "platlib"):
    path = sysconfig.get_path(name)
    print(os.listdir(path) if os.path.isdir(path) else [])
print("site" in sys.modules, [path for path in sys.path if "site-packages" in path], __name__)
exit(7)
"""
    assert run(program) == ProgramResult(
        output=b"[]\n[]\nFalse [] __main__\n", ended="itself", exit_code=7
    )


def test_nothing_but_its_folder_can_be_written() -> None:
    """The libraries are read-only, also for what is root outside; the folder is empty again."""
    program = """\
import os, sys
for path in (sys.executable, os.__file__, "/usr/lib/x", "/lib/x", "/x", "/dev/x", "/etc/x"):
    try:
        open(path, "ab")
        print("wrote", path)
    except OSError:
        pass
print(os.path.exists("/sandbox/mine"))
open("/sandbox/mine", "w").write("x")
"""
    for _ in range(2):
        assert run(program).output == b"False\n"


def test_there_is_no_network() -> None:
    """A server that listens on this machine's loopback is out of reach, by any socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""\
import socket, urllib.request
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
    try:
        socket.socket(family, socket.SOCK_DGRAM)
        print("got one", family)
    except PermissionError:
        pass
try:
    socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), timeout=5)
except OSError as error:
    print(type(error).__name__)
print(len(socket.socketpair()))
"""
        assert run(program).output == b"PermissionError\n2\n"
        server.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_programs_leave_each_other_no_messages() -> None:
    """A pair of sockets gets no name and no other family, and nobody watches what others open."""
    program = """\
import ctypes, errno, socket
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
for action in (lambda: one.bind("\\0name"), lambda: one.connect("\\0name"), one.listen, one.accept):
    try:
        print("done", action())
    except PermissionError:
        pass
libc = ctypes.CDLL(None, use_errno=True)
pair = (ctypes.c_int * 2)()
for name, *arguments in (
    ("inotify_init",),
    ("inotify_init1", 0),
    ("inotify_add_watch", one.fileno(), b"/", 32),
    ("fanotify_init", 0x200, 0),
    ("accept", one.fileno(), None, None),
    *(("socketpair", family, socket.SOCK_DGRAM, 0, pair) for family in (2, 16, 30, 38)),
):
    ctypes.set_errno(0)
    if (getattr(libc, name)(*arguments), ctypes.get_errno()) != (-1, errno.EPERM):
        print(name, arguments, ctypes.get_errno())
one.send(b"pairs work")
print(other.recv(20).decode())
"""
    assert run(program).output == b"pairs work\n"


def test_its_caller_and_its_keeper_cannot_be_killed() -> None:
    """Signals reach no process outside, nor the first one inside; tracing is refused."""
    program = f"""\
import ctypes, os, signal
for pid in (1, os.getppid(), {os.getpid()}, -1):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        try:
            os.kill(pid, number)
        except OSError:
            pass
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(16, 1, 0, 0), ctypes.get_errno())
print(libc.unshare(0x10000000), ctypes.get_errno())
print(libc.mount(b"tmpfs", b"/sandbox", b"tmpfs", 0, None), ctypes.get_errno())
print(os.getuid() != 0, os.getgroups() in ([], [os.getgid()]))
"""
    result = run(program)
    assert result.output == b"-1 1\n-1 1\n-1 1\nTrue True\n"
    assert result.exit_code == 0


def test_it_ends_with_its_caller(
    programs_that_run: Callable[[], list[int]], wait_until_none_is_left: Callable[[], None]
) -> None:
    """A caller that is killed leaves no program running."""
    program = (
        "from rl_tasks import SandboxLimits, run_python\n"
        "limits = SandboxLimits(wall_s=900, cpu_s=900)\n"
        "run_python('import time; time.sleep(800)', stdin=b'', limits=limits)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as caller:
        deadline = time.monotonic() + 60
        while not programs_that_run():
            assert time.monotonic() < deadline, "the program did not start"
            time.sleep(0.02)
        caller.kill()
    wait_until_none_is_left()
