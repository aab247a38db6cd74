"""The program that closes a sandbox around itself and then becomes the code to be tried.

Run by `rl_tasks.sandbox` as a file of its own (``python -I -S sandbox_launcher.py``), with the
standard library alone. It is told everything in one request, which its own package wrote::

    request ──▶ namespaces ──▶ a root folder of read-only libraries ──▶ first process, which waits
                                                                          └──▶ limits, seccomp, exec

Three processes: this one, outside the new PID namespace, which the caller can kill; the first
process inside, whose end makes the kernel kill whatever was left behind; and the code.

Every step either succeeds or is written to the status pipe by name, and nothing runs: the pipe says
``ready`` only if the code was started with every isolation in place.
"""

# It runs for every program that is tried, so it imports nothing that takes its time: no pathlib,
# no typing, no json, no signal.
# ruff: noqa: PTH102, PTH103, PTH112, PTH120, PTH123, PTH211

from __future__ import annotations

import ctypes
import errno
import marshal
import os
import resource
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from rl_tasks.sandbox import Request

_CLONE_NEWNS = 0x00020000
_CLONE_OTHERS = (
    0x02000000  # cgroup
    | 0x04000000  # host name
    | 0x08000000  # System V IPC
    | 0x10000000  # user
    | 0x20000000  # process ids
    | 0x40000000  # network
)
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_SIGINT, _SIGKILL = 2, 9
_NOBODY = 65534
_ROOT_BYTES = 1 << 20
_FILES = 4096
"""Files and folders in a tmpfs; even empty ones take the kernel's memory."""
_SETUP_FAILED = 125


class StepError(Exception):
    """An isolation that cannot be had: which, and why."""


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


_libc = ctypes.CDLL(None, use_errno=True)


def _check(step: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise StepError(f"{step}: {os.strerror(number)} ({errno.errorcode.get(number, number)})")


def _require(who: str, *, alive: bool) -> None:
    if not alive:
        raise StepError(f"{who} has ended")


def _mount(step: str, source: str | None, target: str, kind: str | None, flags: int) -> None:
    _check(
        step,
        _libc.mount(
            None if source is None else source.encode(),
            target.encode(),
            None if kind is None else kind.encode(),
            ctypes.c_ulong(flags),
            None,
        ),
    )


def _mount_tmpfs(target: str, size: int) -> None:
    options = f"mode=0755,size={size},nr_inodes={_FILES}".encode()
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    _check(
        "mount namespace: tmpfs", _libc.mount(b"tmpfs", target.encode(), b"tmpfs", flags, options)
    )


def _set_mount(target: str, attributes: int, *, recursive: bool) -> None:
    attr = _MountAttr(attr_set=attributes)
    flags = _AT_RECURSIVE if recursive else 0
    _check(
        "mount namespace: read-only mounts (Linux 5.12)",
        _libc.syscall(
            _SYS_MOUNT_SETATTR,
            _AT_FDCWD,
            target.encode(),
            flags,
            ctypes.byref(attr),
            ctypes.sizeof(attr),
        ),
    )


def _pivot(old: str) -> None:
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _check("mount namespace: pivot_root", _libc.syscall(number, b".", old.encode()))


def _unshare(step: str, flags: int) -> None:
    _check(step, _libc.unshare(flags))


def _prctl(step: str, option: int, value: int, pointer: object = None) -> None:
    zero = ctypes.c_ulong(0)
    second = zero if pointer is None else pointer
    _check(step, _libc.prctl(option, ctypes.c_ulong(value), second, zero, zero))


def _build_root(request: Request) -> None:
    """Change into a root folder that holds the libraries, read-only, and one writable folder."""
    _mount("mount namespace: private mounts", None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount_tmpfs("/tmp", _ROOT_BYTES)  # noqa: S108 - covered in this namespace only
    os.chdir("/tmp")  # noqa: S108
    os.mkdir("old")
    os.mkdir("new")
    _pivot("old")
    os.chdir("/")
    _mount_tmpfs("/new", _ROOT_BYTES)
    for link, target in request["links"]:
        os.makedirs(os.path.dirname(f"/new{link}"), exist_ok=True)
        os.symlink(target, f"/new{link}")
    for path in request["binds"]:
        _bind(path, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    for path in request["hidden"]:
        _mount_tmpfs(f"/new{path}", 4096)
    for path in request["libraries"]:
        _bind(path, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    for path in request["hidden"]:
        _set_mount(f"/new{path}", _ATTR_RDONLY, recursive=False)
    for path in request["devices"]:
        _bind(path, _ATTR_RDONLY | _ATTR_NOSUID)
    folder = f"/new{request['folder']}"
    os.makedirs(folder)
    _mount_tmpfs(folder, request["folder_bytes"])
    for name, text in request["files"].items():
        with open(f"{folder}/{name}", "x", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    if os.getuid() == 0:
        try:
            os.chown(folder, _NOBODY, _NOBODY)
        except OSError as error:
            raise StepError(f"user {_NOBODY}, which root gives way to: {error.strerror}") from error
    _set_mount("/new", _ATTR_RDONLY, recursive=False)
    os.chdir("/new")
    _check("mount namespace: umount", _libc.umount2(b"/old", _MNT_DETACH))
    _pivot(".")
    _check("mount namespace: umount", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")


def _bind(path: str, attributes: int) -> None:
    source, target = f"/old{path}", f"/new{path}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "xb"):
            pass
    _mount(f"mount namespace: {path}", source, target, None, _MS_BIND | _MS_REC)
    _set_mount(target, attributes, recursive=True)


def _enter_namespaces(proc: int, flags: int) -> None:
    """Become the only user of a new user namespace, under the same number as outside."""
    uid, gid = os.getuid(), os.getgid()
    _unshare("user, process, network, IPC and host name namespaces", flags)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _close_sandbox(request: Request) -> None:
    # /proc is gone once the root folder has changed, and is needed for the maps of users
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    if os.getuid() == 0:
        # root may have to read an interpreter that nobody else may, so the folder comes first
        _unshare("mount namespace", _CLONE_NEWNS)
        _build_root(request)
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        # a process that changed its user may not write its own maps otherwise
        _prctl("user namespace: dumpable", _PR_SET_DUMPABLE, 1)
        _enter_namespaces(proc, _CLONE_OTHERS | _CLONE_NEWNS)
    else:
        _enter_namespaces(proc, _CLONE_OTHERS | _CLONE_NEWNS)
        _build_root(request)
    os.close(proc)


def _limit(request: Request) -> None:
    for limit, value in (
        (resource.RLIMIT_AS, request["memory_bytes"]),
        (resource.RLIMIT_FSIZE, request["folder_bytes"]),
        (resource.RLIMIT_NOFILE, request["open_files"]),
        # of this user in this user namespace (Linux 5.14): two processes of the sandbox's own
        (resource.RLIMIT_NPROC, request["processes"] + 2),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    # SIGXCPU first, so that the exit code tells; SIGKILL for those who ignore it
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_s"], request["cpu_s"] + 1))


def _become_code(request: Request, status: int) -> NoReturn:
    _limit(request)
    os.chdir(request["folder"])
    _prctl("no new privileges", _PR_SET_NO_NEW_PRIVS, 1)
    instructions = bytes.fromhex(request["seccomp"])
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = _FilterProgram(len(instructions) // 8, ctypes.addressof(buffer))
    _prctl("seccomp filter", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))
    os.write(status, b"ready")  # the pipe closes at exec
    os.execve(request["argv"][0], request["argv"], {"LANG": "C.UTF-8"})  # noqa: S606


def _code_of(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _report(status: int, error: BaseException) -> NoReturn:
    text = str(error) if isinstance(error, StepError) else f"{type(error).__name__}: {error}"
    os.write(status, f"\n{text}".encode(errors="replace"))
    os._exit(_SETUP_FAILED)


def _first_process(request: Request, status: int, parent_lives: int) -> NoReturn:
    """Start the code and wait for it alone; whatever else is left dies with this process."""
    try:
        _prctl("death signal", _PR_SET_PDEATHSIG, _SIGKILL)
        # it may have been killed before the signal was asked for
        _require("its launcher", alive=not select.select([parent_lives], [], [], 0)[0])
        os.close(parent_lives)
        os.setsid()
        # nothing inside can interrupt it: the kernel keeps signals without a handler from it
        _libc.signal(_SIGINT, None)
        code = os.fork()
        if code == 0:
            _become_code(request, status)
        for descriptor in (0, 1, status):
            os.close(descriptor)
    except BaseException as error:  # noqa: BLE001 - reported by name
        _report(status, error)
    while True:
        pid, ended = os.waitpid(-1, 0)
        if pid == code:
            os._exit(_code_of(ended))


def main() -> NoReturn:
    """Read the request from one descriptor, report on another, and run the code."""
    request_fd, status, caller = map(int, sys.argv[1:])
    os.set_inheritable(status, False)
    os.umask(0o022)
    try:
        with open(request_fd, "rb") as file:
            request: Request = marshal.loads(file.read())  # noqa: S302 - written by the caller
        _close_sandbox(request)
        _prctl("death signal", _PR_SET_PDEATHSIG, _SIGKILL)
        # it may have ended before the signal was asked for
        _require("its caller", alive=os.getppid() == caller)
        parent_lives, held_open = os.pipe()
        first = os.fork()
    except BaseException as error:  # noqa: BLE001 - reported by name
        _report(status, error)
    if first == 0:
        os.close(held_open)
        _first_process(request, status, parent_lives)
    for descriptor in (0, 1, status):
        os.close(descriptor)
    _, ended = os.waitpid(first, 0)
    os._exit(_code_of(ended))


if __name__ == "__main__":
    main()
