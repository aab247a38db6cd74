"""Programs that attack the process that they are a copy of, and what happens when that ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl_tasks import (
    ProgramResult,
    SandboxFailedError,
    SandboxLimits,
    run_python,
    sandbox_pool,
)

MIB = 2**20


pytestmark = pytest.mark.usefixtures("needs_sandbox")


def run(program: str, stdin: bytes = b"", **limits: float) -> ProgramResult:
    settings: dict[str, float] = {"wall_s": 60.0, "cpu_s": 60, **limits}
    return run_python(program, stdin=stdin, limits=SandboxLimits(**settings))  # type: ignore[arg-type]


def launcher() -> int:
    """Process id of the launcher that the next program will be a copy of."""
    pool = sandbox_pool._pool((), os.getpid())
    return int(pool._idle.queue[-1]._process.pid)


def test_one_launcher_runs_one_program_after_the_other() -> None:
    """Also after a program that failed: it was a copy."""
    assert run("print(1)").output == b"1\n"
    first = launcher()
    assert run("raise ValueError").exit_code == 1
    assert run("print(2)").output == b"2\n"
    assert launcher() == first


def test_no_signal_reaches_the_launcher() -> None:
    """Neither by number nor by group nor by session nor by the limits of a process."""
    run("pass")
    before = launcher()
    program = f"""\
import os, resource, signal
def attempt(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        pass
print(os.getpid(), os.getppid(), os.getsid(0), os.getpgid(0), flush=True)
for pid in (*range(2, 3000), {before}, {before} + 1, {os.getpid()}):
    if pid != os.getpid():
        attempt(os.kill, pid, signal.SIGKILL)
        attempt(os.killpg, pid, signal.SIGKILL)
        attempt(resource.prlimit, pid, resource.RLIMIT_CPU, (0, 0))
        attempt(os.pidfd_open, pid)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(0, signal.SIGTERM)
attempt(os.kill, -1, signal.SIGKILL)
os.killpg(0, signal.SIGTERM)
print("end", flush=True)
os.kill(0, signal.SIGKILL)
"""
    result = run(program)
    assert result.output == b"2 1 1 1\nend\n"
    assert result.exit_code == 128 + signal.SIGKILL
    assert run("print(3)").output == b"3\n"
    assert launcher() == before


def test_the_end_of_the_first_process_inside_is_the_programs_end() -> None:
    """Limits of another process of the same user can be set; what comes of it stays inside."""
    run("pass")
    before = launcher()
    program = """\
import resource
resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))
while True: pass
"""
    assert run(program, cpu_s=2).exit_code != 0
    assert run("print(3)").output == b"3\n"
    assert launcher() == before


def test_what_a_program_changes_is_changed_for_no_other() -> None:
    """Modules, built-ins, even the memory of small numbers: it was all a copy."""
    run("pass")
    before = launcher()
    program = """\
import builtins, ctypes, json, os, random, sys
builtins.print = builtins.input = json.loads = json.dumps = lambda *_: "poisoned"
random.seed(1)
os.environ["POISON"] = "1"
sys.path.insert(0, "/sandbox")
open("/sandbox/heapq.py", "w").write("raise SystemExit(9)")
sys.modules["math"] = json
sys.setrecursionlimit(60)
os.umask(0o777)
ctypes.memset(id(7) + 24, 1, 4)  # the number 7 is another one now
"""
    assert run(program).exit_code == 0
    check = """\
import heapq, json, math, os, sys
print(json.loads("[3]"), math.sqrt(4), sorted(os.environ), sys.getrecursionlimit(), 3 + 4)
print(os.listdir(), os.umask(0), "/sandbox" in sys.path)
"""
    assert run(check).output == b"[3] 2.0 ['LANG'] 1000 7\n['main.py'] 18 False\n"
    assert launcher() == before


def test_no_descriptor_leads_to_the_launcher() -> None:
    """Nothing to forge an exit code with, and standard input cannot be written to."""
    run("pass")
    before = launcher()
    program = """\
import os, socket
there = []
for descriptor in range(1000):
    try:
        os.fstat(descriptor)
        there.append(descriptor)
        os.write(descriptor, b"0")
    except OSError:
        pass
    try:
        socket.socket(fileno=descriptor).send(b"0")
        there.append("a socket")
    except OSError:
        pass
print(there)
raise SystemExit(5)
"""
    result = run(program)
    assert (result.output, result.exit_code) == (b"0[0, 1, 2]\n", 5)
    assert launcher() == before


def test_no_flag_of_an_open_file_outlives_its_program() -> None:
    """Standard error is nothing that anybody reads, and each program's own."""
    run("pass")
    before = launcher()
    program = """\
import fcntl, os
F_SETSIG, F_GETSIG, SIGNAL = 10, 11, 12
for descriptor in range(3):
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    print(flags & (os.O_APPEND | os.O_NONBLOCK), fcntl.fcntl(descriptor, F_GETSIG))
fcntl.fcntl(2, fcntl.F_SETFL, flags | os.O_APPEND | os.O_NONBLOCK)
fcntl.fcntl(2, F_SETSIG, SIGNAL)
print(os.fstat(2).st_rdev == os.stat("/dev/null").st_rdev, os.write(2, b"unread"))
"""
    for _ in range(2):
        assert run(program).output == b"0 0\n" * 3 + b"True 6\n"
    assert launcher() == before


def test_a_program_has_no_capability() -> None:
    """It is no administrator of the namespaces that were made for it, filter or not."""
    program = """\
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
print(libc.capget(header, sets), list(sets))
for call in (lambda: libc.sethostname(b"x", 1), lambda: libc.setns(0, 0),
             lambda: libc.syscall(435, 0, 0), lambda: libc.setuid(0)):
    ctypes.set_errno(0)
    print(call(), ctypes.get_errno() != 0)
for limit in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU):
    try:
        resource.setrlimit(limit, (-1, -1))
        print("raised", limit)
    except ValueError:
        pass
"""
    assert run(program).output == b"0 [0, 0, 0, 0, 0, 0]\n" + b"-1 True\n" * 4


def test_nothing_of_a_program_is_in_the_launchers_memory() -> None:
    """So nothing of it is in the memory that the next program is a copy of."""
    marker = "".join(chr(ord("a") + digit) for digit in (7, 20, 13, 19, 4, 17)) * 3
    assert run(f"print(input() == {marker!r})", stdin=marker.encode()).output == b"True\n"
    pid = launcher()
    readable = 0
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            addresses, permissions, *_ = line.split()
            assert not ("w" in permissions and "s" in permissions), line
            if not permissions.startswith("rw"):
                continue
            start, end = (int(address, 16) for address in addresses.split("-"))
            memory.seek(start)
            content = memory.read(end - start)
            readable += len(content)
            assert marker.encode() not in content
    assert readable > MIB


def test_programs_draw_different_random_numbers() -> None:
    """A module that was loaded before the copy is seeded after it."""
    drawn = {run("import random; print(random.random())").output for _ in range(3)}
    assert len(drawn) == 3


@pytest.mark.parametrize(
    "program",
    ["import time; time.sleep(1000)", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"],
)
def test_a_launcher_whose_program_had_to_be_killed_is_not_used_again(
    program: str, wait_until_none_is_left: Callable[[], None]
) -> None:
    """The kernel ends both, and the next program is a copy of another one."""
    run("pass")
    before = launcher()
    assert run(program, wall_s=0.5, cpu_s=1).ended == "wall_time"
    wait_until_none_is_left()
    assert not Path(f"/proc/{before}").exists()
    assert run("print(1)").output == b"1\n"
    assert launcher() != before


def test_a_program_ends_with_its_launcher(
    programs_that_run: Callable[[], list[int]], wait_until_none_is_left: Callable[[], None]
) -> None:
    """Whoever kills it: the program is gone, has no result, and the next one is not concerned."""
    run("pass")
    pid = launcher()

    def kill() -> None:
        while len(programs_that_run()) < 2:
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(SandboxFailedError, match="launcher ended, and the program with it"):
        run("import time; time.sleep(1000)")
    thread.join()
    wait_until_none_is_left()
    assert run("print(1)").output == b"1\n"
    os.kill(launcher(), signal.SIGKILL)  # an idle one
    assert run("print(2)").output == b"2\n"


def test_a_new_launcher_that_ends_at_once_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next new one would be no better, so there is no second try."""
    made = []

    def take(pool: object) -> sandbox_pool._Launcher:
        del pool
        made.append(sandbox_pool._Launcher(()))
        assert len(made) == 1
        made[0]._process.kill()
        made[0]._process.wait()
        return made[0]

    monkeypatch.setattr(sandbox_pool._Pool, "take", take)
    with pytest.raises(SandboxFailedError, match="launcher was given no program"):
        run("print(1)")


def test_threads_that_begin_at_once_have_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers of a second one would be kept and never used."""
    both_are_making = threading.Barrier(2)

    def slowly(libraries: tuple[str, ...]) -> sandbox_pool._Pool:
        both_are_making.wait(timeout=60)
        return make(libraries)

    make = sandbox_pool._Pool
    monkeypatch.setattr(sandbox_pool, "_Pool", slowly)
    monkeypatch.setattr(sandbox_pool, "_pools", {})
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda _: sandbox_pool._pool(("/x",), 1), range(2))
    assert one is other


def test_a_launcher_ends_with_its_caller_though_a_child_lives_on() -> None:
    """A fork of the caller holds the same socket, so its end is no sign; and has its own launchers.

    Whoever was forked may run programs as well.
    """
    caller = """
import os, signal, sys, time
from rl_tasks import SandboxLimits, run_python, sandbox_pool
def run():
    run_python("pass", stdin=b"", limits=SandboxLimits(wall_s=60.0))
    return sandbox_pool._pool((), os.getpid())._idle.queue[-1]._process.pid
first = run()
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.write(write, b"%d" % run())
    time.sleep(1000)
print(first, int(os.read(read, 20)), child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen(
        [sys.executable, "-c", caller], stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        first, second, child = map(int, started.stdout.readline().split())
    try:
        assert first != second
        wait_for_the_end_of(first)
        assert Path(f"/proc/{second}").exists()
    finally:
        os.kill(child, signal.SIGKILL)
    wait_for_the_end_of(second)


def wait_for_the_end_of(pid: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and "Z" not in state(pid):
        assert time.monotonic() < deadline, f"{pid} did not end"
        time.sleep(0.02)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
