"""Machines that can and cannot close a sandbox."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_tasks import seccomp

pytestmark = pytest.mark.usefixtures("needs_sandbox")


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
