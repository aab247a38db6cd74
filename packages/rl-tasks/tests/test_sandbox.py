"""What a program in a sandbox may do, and what it is ended for."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_tasks import (
    ProgramResult,
    SandboxFailedError,
    SandboxLimits,
    run_python,
)

MIB = 2**20

KEPT = """\
import atexit, io, os, sys
sys.stdout = io.StringIO()
atexit.register(lambda: os.write(1, sys.stdout.getvalue().encode()))
print("kept")
"""


pytestmark = pytest.mark.usefixtures("needs_sandbox")


def run(program: str, stdin: bytes = b"", **limits: float) -> ProgramResult:
    settings: dict[str, float] = {"wall_s": 60.0, "cpu_s": 60, **limits}
    return run_python(program, stdin=stdin, limits=SandboxLimits(**settings))  # type: ignore[arg-type]


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
    program: str,
    limits: dict[str, float],
    ended: str,
    exit_code: int | None,
    wait_until_none_is_left: Callable[[], None],
) -> None:
    """Time, memory, output and files have limits, and what runs into one ends."""
    result = run(program, b"", **limits)
    assert result.ended == ended
    assert result.exit_code != 0
    if exit_code is not None:
        assert result.exit_code == exit_code
    assert len(result.output) <= MIB
    wait_until_none_is_left()


@pytest.mark.parametrize(
    "program",
    [
        "import atexit; atexit.register(print, 'at the end'); print('before')",
        "import atexit; atexit.register(print, 'at the end'); raise ValueError",
        "import threading as t, time\nt.Timer(0.3, print, ['late']).start(); print('early')",
        "file = open(1, 'w', closefd=False); file.write('never closed')",
        "import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.buffer); print('wrapped')",
        KEPT,
        "import sys; sys.stdout.close()",
        "import os; print('lost'); os.close(1)",
        "class A:\n  def __del__(self): print('deleted', here)\nhere = 1; a = A()",
        "import os; print('lost'); os._exit(3)",
        "import sys; sys.exit('text')",
        "import sys; sys.exit()",
        "import sys; sys.exit(-1)",
        "import sys; sys.exit(256)",
        "import sys; sys.exit(2**64)",
        "import sys; sys.exit(True)",
        "raise SystemExit(4, 5)",
        "raise KeyboardInterrupt",
        "import sys; sys.excepthook = lambda *_: print('hook'); 1 / 0",
        "import os; os.abort()",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "this is no Python",
        "b'\\x00'; \x00",
        "# coding: latin-1\nprint(len('\u00e9'))",
        "def f(x: undefined): pass",
        "import sys; print(__name__, __file__ == sys.argv[0], len(sys.argv), sorted(globals()))",
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
        "print(sys)",
        "import sys; print(sys.stdin.readline()); print(sys.stdin.encoding, sys.stdin.errors)",
        "import sys; print(sys.stdin.buffer.read(), input.__module__, sys.stdout.line_buffering)",
        "print(open(0).read(), '\\ud800')",
        "import os, sys; print(os.isatty(1), sys.flags.isolated, sys.flags.utf8_mode)",
        "import signal; print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGPIPE))",
    ],
)
def test_a_program_ends_as_with_python(program: str, tmp_path: Path) -> None:
    """It is no start of Python but a copy of a started one: output and exit code are the same."""
    file = tmp_path / "main.py"
    file.write_text(program, encoding="utf-8")
    given = tmp_path / "stdin"
    given.write_bytes(b"one\r\ntwo\n")
    with given.open("rb") as stdin:
        python = subprocess.run(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(file)],
            stdin=stdin,
            capture_output=True,
            check=False,
        )
    result = run(program, stdin=given.read_bytes())
    code = python.returncode
    assert (result.output, result.exit_code) == (python.stdout, code if code >= 0 else 128 - code)


def test_a_fork_bomb_stays_small(wait_until_none_is_left: Callable[[], None]) -> None:
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


def test_what_is_left_behind_is_killed(wait_until_none_is_left: Callable[[], None]) -> None:
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


def test_a_limit_that_cannot_be_reached_is_refused() -> None:
    """CPU time beyond what the wall clock admits would be no limit."""
    with pytest.raises(ValueError, match="cpu_s = 50 can never be reached within wall_s = 10"):
        SandboxLimits(wall_s=10.0, cpu_s=50, max_processes=4)
