"""What several tests of sandboxes need."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_tasks import SandboxUnavailableError, check_sandbox

NOBODY = 65534


def processes_of_sandboxes() -> list[int]:
    """Processes of this user, or of whom root gives way to, in a process namespace of their own."""
    user = NOBODY if os.getuid() == 0 else os.getuid()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            lines = (entry / "status").read_text().splitlines()
        except OSError:
            continue  # ended in the meantime
        status = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
        if len(status["NSpid"]) > 1 and status["Uid"][0] == str(user) and status["State"][0] != "Z":
            found.append(int(entry.name))
    return found


@pytest.fixture(scope="session")
def needs_sandbox() -> None:
    """Skips where this machine cannot close a sandbox, and says why."""
    try:
        check_sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def programs_that_run() -> Callable[[], list[int]]:
    """Process ids of what runs in sandboxes now."""
    return processes_of_sandboxes


@pytest.fixture
def wait_until_none_is_left() -> Callable[[], None]:
    """Waits for the end of everything that runs in sandboxes."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while processes_of_sandboxes():
            assert time.monotonic() < deadline, "a process of a sandbox outlived it"
            time.sleep(0.02)

    return wait
