"""The progress display."""

import html
import io
import os
import pty
import re
import select
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from types import ModuleType

import pytest
from rich.console import Console

from rl_metrics import ProgressDisplay

VALUES = {
    "reward/train/mean": 0.3125,
    "reward/heldout/mean": 0.25,
    "length/completion/mean": 13.94,
    "length/stopped/fraction": 0.55,
    "time/step/seconds": 6.12,
    "throughput/sampled/tokens_per_second": 1412.0,
}


def plain_console(width: int = 80) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=width), file


def test_a_log_file_gets_one_plain_line_per_step() -> None:
    """Without a terminal nothing moves, and a narrow width breaks no line."""
    console, file = plain_console(width=20)
    with ProgressDisplay(num_steps=16, console=console) as display:
        display.stage("sampling")
        display.update(0, {"reward/heldout/mean": 0.1})
        display.update(3, VALUES)
        display.say("checkpoint saved in [runs/a]")
    lines = file.getvalue().splitlines()
    assert len(lines) == 3
    assert re.fullmatch(r"step 0/16  held out 0\.100  elapsed 0:00", lines[0])
    assert re.fullmatch(
        r"step 3/16  reward 0\.312  held out 0\.250  length 13\.9  ended 55%  6\.1 s/step  "
        r"1,412 tokens/s  elapsed 0:00  left 0:00",
        lines[1],
    )
    assert lines[2] == "checkpoint saved in [runs/a]"
    assert "\x1b" not in file.getvalue()


def test_the_last_step_has_nothing_left() -> None:
    """The line of the last step names no remaining time."""
    console, file = plain_console()
    with ProgressDisplay(num_steps=2, done_steps=1, console=console) as display:
        display.update(2, VALUES)
    assert "left" not in file.getvalue()


def test_remaining_time_is_recent_seconds_per_step_times_steps_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After steps of 10 s each, 14 steps are left for 140 s; a resumed run counts its own."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    console, file = plain_console()
    with ProgressDisplay(num_steps=20, done_steps=4, console=console) as display:
        for step in (5, 6):
            now += 10.0
            display.update(step, VALUES)
    assert file.getvalue().splitlines()[-1].endswith("elapsed 0:20  left 2:20")


def test_wrong_steps_and_names_are_refused() -> None:
    """The display takes the list of names, and steps of this run."""
    console, _ = plain_console()
    display = ProgressDisplay(num_steps=3, console=console)
    with pytest.raises(ValueError, match="unknown metric 'reward'"):
        display.update(1, {"reward": 1.0})
    with pytest.raises(ValueError, match="a step from 0 to 3, got 4"):
        display.update(4, VALUES)
    with pytest.raises(ValueError, match="num_steps 2 and done_steps 3"):
        ProgressDisplay(num_steps=2, done_steps=3)


def test_a_terminal_gets_rows_that_stay_and_a_display_that_moves() -> None:
    """Reward, held-out reward, length, share ended, seconds and tokens/s stand in the row."""
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None, _environ={})
    with ProgressDisplay(num_steps=16, console=console) as display:
        display.stage("training [bold]")
        display.update(2, {"reward/train/mean": 0.125})
        display.update(3, VALUES)
    lines = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", file.getvalue()).splitlines()
    header = next(line for line in lines if "tokens/s" in line)
    # the frame of an earlier refresh may end in the same line
    assert header.split("╯")[-1].split() == [
        "step",
        "reward",
        "held",
        "out",
        "length",
        "ended",
        "s/step",
        "tokens/s",
    ]
    row = next(line for line in lines if line.lstrip().startswith("3/16"))
    assert row.split()[1] == "0.312"
    assert row.split()[3:] == ["0.250", "13.9", "55%", "6.1", "1,412"]
    display_lines = "\n".join(lines)
    assert "training [bold]" in display_lines
    assert "reward 0.125 \u2581\u2588 0.312" in display_lines
    assert sum("tokens/s" in line for line in lines) == 1


@pytest.mark.parametrize("width", [50, 58, 66, 80, 200])
def test_the_reward_is_legible_at_every_width(width: int) -> None:
    """On a narrow terminal other columns go first, and no line is wider than the terminal."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None, _environ={})
    with ProgressDisplay(num_steps=16, console=console) as display:
        for step in range(1, 4):
            display.update(step, VALUES)
    lines = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", file.getvalue()).splitlines()
    trend = [line for line in lines if "\u2584" in line][-1]
    assert re.search(r"reward .*\u2584{3} 0\.312 .*held out .*\u2584{3} 0\.250", trend)
    row = next(line for line in lines if line.lstrip().startswith("3/16"))
    assert "0.312" in row
    assert "0.250" in row
    assert max(len(line) for line in lines) <= width


FLOW = {
    "idle/trainer/fraction": 0.042,
    "idle/sampler/fraction": 0.1,
    "queue/ready/value": 41.4,
    "queue/in_flight/value": 1128.0,
    "staleness/trajectory/max": 3.0,
    "lost/groups/fraction": 0.004,
}


def test_an_asynchronous_run_shows_who_waits_for_whom() -> None:
    """In the moving display and in a log file's line."""
    shown = "trainer idle 4%  samplers idle 10%  waiting 41  stale 3  lost 0.4%"
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None, _environ={})
    with ProgressDisplay(num_steps=16, console=console) as display:
        display.update(3, VALUES | FLOW)
    text = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", file.getvalue())
    assert shown in text
    console, file = plain_console()
    with ProgressDisplay(num_steps=16, console=console) as display:
        display.update(3, FLOW)
    assert f"{shown}  in flight 1,128  elapsed" in file.getvalue()


@dataclass
class Output:
    """An output of a notebook cell, as IPython gives it: what was put into it."""

    contents: list[str]

    def update(self, obj: object) -> None:
        self.contents.append(obj._repr_mimebundle_()["text/html"])  # type: ignore[attr-defined]


def test_a_notebook_has_one_output_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest twelve steps under one header, and nothing of a stage's text is markup."""
    outputs: list[Output] = []

    def display_output(_: object, *, display_id: bool) -> Output:
        assert display_id
        outputs.append(Output(contents=[]))
        return outputs[-1]

    # IPython is there only where a notebook runs
    ipython, ipython_display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython_display.display = display_output  # type: ignore[attr-defined]
    ipython.display = ipython_display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython_display)
    file = io.StringIO()
    console = Console(file=file, force_jupyter=True, _environ={})
    with ProgressDisplay(num_steps=20, console=console) as display:
        for step in range(1, 16):
            display.update(step, VALUES)
        display.stage("see <b>x</b>")
    (output,) = outputs
    during, after = output.contents[-2:]
    text = html.unescape(re.sub(r"<[^>]+>", "", during))
    assert len(re.findall(r"^ *\d+/20 ", text, flags=re.MULTILINE)) == 12
    assert text.count("tokens/s") == 1
    assert text.index("4/20") < text.index("15/20")
    assert "see <b>x</b>" in text
    assert "<b>" not in during
    assert "see " not in after
    assert file.getvalue() == ""


def test_a_notebook_without_ipython_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich takes some services for Jupyter that are none."""
    monkeypatch.setitem(sys.modules, "IPython", None)
    console = Console(file=io.StringIO(), force_jupyter=True, record=True, _environ={})
    with ProgressDisplay(num_steps=2, console=console) as display:
        display.update(1, VALUES)
    assert "step 1/2  reward 0.312" in console.export_text()


PROGRAM = textwrap.dedent("""
    import time
    from rl_metrics import ProgressDisplay
    with ProgressDisplay(num_steps=3) as display:
        display.update(1, {"reward/train/mean": 0.5})
        print("READY", flush=True)
        time.sleep(60)
""")


def test_ctrl_c_restores_the_terminal() -> None:
    """On a real pseudo terminal the cursor comes back after Ctrl-C, and the display is gone."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=_own_terminal,  # noqa: PLW1509 - the child has one thread
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
    )
    os.close(terminal)
    output = b""
    interrupted = False
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        ready, _, _ = select.select([controller], [], [], 1.0)
        if ready:
            try:
                chunk = os.read(controller, 65536)
            except OSError:  # Linux's way of saying that the other end is closed
                break
            if not chunk:
                break
            output += chunk
        if b"READY" in output and not interrupted:
            interrupted = True
            os.write(controller, b"\x03")
    os.close(controller)
    assert process.wait(timeout=30) != 0
    assert interrupted
    text = output.decode()
    assert "KeyboardInterrupt" in text
    hidden, shown = text.rfind("\x1b[?25l"), text.rfind("\x1b[?25h")
    assert 0 <= hidden < shown


def _own_terminal() -> None:
    import fcntl  # noqa: PLC0415 - runs in the child
    import termios  # noqa: PLC0415 - runs in the child

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
