"""Code that nobody has read: hostile programs, and machines that cannot close a sandbox."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rl_tasks import (
    ProgramResult,
    SandboxFailedError,
    SandboxLimits,
    SandboxUnavailableError,
    check_sandbox,
    run_python,
    seccomp,
)

MIB = 2**20


def missing() -> str | None:
    try:
        check_sandbox()
    except SandboxUnavailableError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def run(program: str, stdin: bytes = b"", **limits: float) -> ProgramResult:
    settings: dict[str, float] = {"wall_s": 60.0, "cpu_s": 60, **limits}
    return run_python(program, stdin=stdin, limits=SandboxLimits(**settings))  # type: ignore[arg-type]


def processes_of_sandboxes() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"/sandbox/main.py" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # ended in the meantime
    return found


def wait_until_none_is_left() -> None:
    deadline = time.monotonic() + 60
    while processes_of_sandboxes():
        assert time.monotonic() < deadline, "a process of a sandbox outlived it"
        time.sleep(0.02)


def test_a_program_reads_and_writes() -> None:
    """Standard input and output, the exit code, and modules of Python's own library."""
    program = "import math, sys\nprint(math.factorial(int(input())))\nsys.exit(3)"
    assert run(program, stdin=b"5\n") == ProgramResult(output=b"120\n", ended="itself", exit_code=3)


@pytest.mark.parametrize(
    ("program", "limits", "ended", "exit_code"),
    [
        ("while True: pass", {"cpu_s": 1}, "itself", 128 + signal.SIGXCPU),
        (
            "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
            {"cpu_s": 1},
            "itself",
            128 + signal.SIGKILL,
        ),
        ("import time; time.sleep(1000)", {"wall_s": 0.5, "cpu_s": 1}, "wall_time", None),
        ("while True: print('x' * 100000)", {}, "output", None),
        (
            "import os, time\nwhile True: os.write(1, b'x'); time.sleep(0.0001)",
            {"wall_s": 0.5, "cpu_s": 1},
            "wall_time",
            None,
        ),
        (
            "import os\nos.close(1)\nwhile True: pass",
            {"wall_s": 0.5, "cpu_s": 1},
            "wall_time",
            None,
        ),
        ("x = bytearray(10**10)", {}, "itself", 1),
        ("x = []\nwhile True: x.append(bytearray(10**6))", {}, "itself", 1),
        (
            "import sys; sys.setrecursionlimit(10**9)\ndef f(n): return [f(n + 1)]\nf(0)",
            {"memory_bytes": 64 * MIB},
            "itself",
            None,
        ),
        ("open('/sandbox/big', 'wb').write(bytes(10**8))", {}, "itself", None),
        ("f = [open('/dev/null') for _ in range(1000)]", {}, "itself", 1),
        (
            "import os\nfor i in range(20): open(f'/sandbox/{i}', 'wb').write(bytes(2**20))",
            {},
            "itself",
            1,
        ),
        ("for i in range(10**5): open(f'/sandbox/{i}', 'w').close()", {}, "itself", 1),
    ],
    ids=[
        "endless loop",
        "endless loop that ignores the signal",
        "sleep",
        "flood of output",
        "trickle of output",
        "closed output",
        "one large allocation",
        "many allocations",
        "deep recursion",
        "large file",
        "open files",
        "many files",
        "many empty files",
    ],
)
def test_what_is_too_much_ends(
    program: str, limits: dict[str, float], ended: str, exit_code: int | None
) -> None:
    """Time, memory, output and files have limits, and what runs into one ends."""
    result = run(program, b"", **limits)
    assert result.ended == ended
    assert result.exit_code != 0
    if exit_code is not None:
        assert result.exit_code == exit_code
    assert len(result.output) <= MIB
    wait_until_none_is_left()


def test_a_fork_bomb_stays_small() -> None:
    """Of endless forks four processes come to be, and all end with the sandbox."""
    program = """\
import os, time
children = 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(1000)
    except OSError:
        break
    children += 1
print(children)
"""
    assert run(program).output == b"3\n"
    endless = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert run(endless, wall_s=0.5, cpu_s=1).exit_code != 0
    wait_until_none_is_left()


def test_threads_count_as_processes() -> None:
    """The fourth thread beside the first of four does not start."""
    program = """\
import threading, time
started = 0
try:
    for _ in range(10):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        started += 1
except RuntimeError:
    print(started)
"""
    assert run(program).output == b"3\n"


def test_what_is_left_behind_is_killed() -> None:
    """A child in a session of its own, without the output, ends with the program."""
    program = """\
import os, time
if os.fork() == 0:
    os.setsid()
    os.close(1)
    time.sleep(1000)
print("done")
"""
    assert run(program) == ProgramResult(output=b"done\n", ended="itself", exit_code=0)
    wait_until_none_is_left()


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


def test_it_ends_with_its_caller() -> None:
    """A caller that is killed leaves no program running."""
    program = (
        "from rl_tasks import SandboxLimits, run_python\n"
        "limits = SandboxLimits(wall_s=900, cpu_s=900)\n"
        "run_python('import time; time.sleep(800)', stdin=b'', limits=limits)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as caller:
        deadline = time.monotonic() + 60
        while not processes_of_sandboxes():
            assert time.monotonic() < deadline, "the program did not start"
            time.sleep(0.02)
        caller.kill()
    wait_until_none_is_left()


def test_a_ctrl_c_that_the_caller_survives_is_no_end_of_the_program() -> None:
    """It goes to the whole foreground group; a program that was right would be graded as failed."""
    caller = """
import os, signal, threading
from rl_tasks import SandboxLimits, run_python
signal.signal(signal.SIGINT, lambda *_: None)
def work():
    limits = SandboxLimits(wall_s=60.0, cpu_s=60)
    print(run_python("import time; time.sleep(0.5); print(3)", stdin=b"", limits=limits))
thread = threading.Thread(target=work)
thread.start()
while thread.is_alive():
    os.killpg(0, signal.SIGINT)
    thread.join(0.05)
"""
    result = subprocess.run(
        [sys.executable, "-c", caller],
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "ProgramResult(output=b'3\\n', ended='itself', exit_code=0)\n"


def test_threads_may_run_sandboxes_at_the_same_time() -> None:
    """Each gets its own input and output."""
    outputs: dict[int, bytes] = {}

    def double(number: int) -> None:
        outputs[number] = run("print(2 * int(input()))", stdin=b"%d\n" % number).output

    threads = [threading.Thread(target=double, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert outputs == {number: b"%d\n" % (2 * number) for number in range(6)}


def test_packages_are_readable_where_they_were_named(tmp_path: Path) -> None:
    """A folder of packages can be imported from and not written to."""
    tmp_path.chmod(0o755)
    (tmp_path / "offered.py").write_text("ANSWER = 42\n")
    program = f"import offered; print(offered.ANSWER); open({str(tmp_path / 'x')!r}, 'w')"
    result = run_python(
        program, stdin=b"", limits=SandboxLimits(wall_s=60.0), library_paths=(tmp_path,)
    )
    assert (result.output, result.exit_code) == (b"42\n", 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["offered.py"]


def test_a_program_that_does_not_fit_is_no_fault_of_the_program() -> None:
    """What cannot be set up is an error with the step, and nothing ran."""
    with pytest.raises(SandboxFailedError, match="No space left on device"):
        run("#" * (2 * MIB), folder_bytes=MIB)


def test_without_an_isolation_it_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where namespaces are forbidden, checking names what is missing and nothing runs."""
    monkeypatch.setattr(seccomp, "_REFUSED", {"unshare": (272, 97)})
    program = f"""\
import ctypes
from rl_tasks import SandboxUnavailableError, check_sandbox
instructions = bytes.fromhex({seccomp.seccomp_filter(os.uname().machine).hex()!r})
buffer = ctypes.create_string_buffer(instructions, len(instructions))
class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("at", ctypes.c_void_p))
libc = ctypes.CDLL(None)
zero = ctypes.c_ulong(0)
assert libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero) == 0
filter = Program(len(instructions) // 8, ctypes.addressof(buffer))
assert libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(filter), zero, zero) == 0
try:
    check_sandbox()
except SandboxUnavailableError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    step = "mount namespace" if os.getuid() == 0 else "user, process, network, IPC and host name"
    assert f"this machine cannot close a sandbox: {step}" in result.stdout
    assert "Operation not permitted (EPERM)" in result.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_an_ordinary_user_gets_the_same(tmp_path: Path) -> None:
    """Neither root nor a privilege is needed, if the interpreter can be read."""
    prefix = Path(sys.base_prefix).resolve()
    closed = [p for p in (prefix, *prefix.parents) if not p.stat().st_mode & 0o001]
    program = (
        "import os; from rl_tasks import SandboxLimits, run_python\n"
        "print(run_python('import os; print(os.getuid(), os.listdir())', stdin=b'',"
        " limits=SandboxLimits(wall_s=60.0)).output)"
    )
    # an interpreter in root's own folder is shown to the user in a mount namespace
    show = (
        f"mount --bind {prefix} {tmp_path} && mount -t tmpfs none {closed[-1]} && "
        f"chmod 755 {closed[-1]} && mkdir -p {prefix} && mount --bind {tmp_path} {prefix} && "
        if closed
        else ""
    )
    become = "exec setpriv --reuid 12345 --regid 12345 --clear-groups"
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{show}{become} "$@"', "-", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    if "ModuleNotFoundError" in result.stderr or "ermission denied" in result.stderr:
        pytest.skip("this checkout cannot be read by others")
    assert (result.stdout, result.stderr) == ("b\"12345 ['main.py']\\n\"\n", "")


def test_a_limit_that_cannot_be_reached_is_refused() -> None:
    """CPU time beyond what the wall clock admits would be no limit."""
    with pytest.raises(ValueError, match="cpu_s = 50 can never be reached within wall_s = 10"):
        SandboxLimits(wall_s=10.0, cpu_s=50, max_processes=4)
