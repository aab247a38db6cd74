"""What the process of a sandbox asks of the kernel and Python has no function for.

Used by `rl_tasks.sandbox_launcher`, which runs with the standard library alone. Every function here
either does what it says or raises `StepError` with the name of the isolation that cannot be had.
"""

# The launcher's process is what every program is a copy of: it imports as little as it can.
# ruff: noqa: PTH102, PTH103, PTH112, PTH120, PTH123, PTH211

from __future__ import annotations

import ctypes
import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rl_tasks.sandbox_machine import Machine

_NEW_MOUNTS, _NEW_CGROUP, _NEW_HOST_NAME, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NETWORK = (
    *(0x00020000, 0x02000000, 0x04000000, 0x08000000),
    *(0x10000000, 0x20000000, 0x40000000),
)
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SYS_MOUNT_SETATTR, _SYS_PIDFD_OPEN, _SYS_CLOSE_RANGE = 442, 434, 436
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_SIGINT, _SIGKILL, _SIGCHLD = 2, 9, 17
_CAPABILITY_VERSION = 0x20080522
_NOBODY = 65534
_ROOT_BYTES = 1 << 20
_FILES = 4096
"""Files and folders in a tmpfs; even empty ones take the kernel's memory."""


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
_libc.signal.restype = ctypes.c_void_p


def _check(step: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise StepError(f"{step}: {os.strerror(number)} ({errno.errorcode.get(number, number)})")
    return result


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


def mount_tmpfs(target: str, size: int) -> None:
    """A folder in memory of at most `size` bytes, which holds neither devices nor set-uid files."""
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


def _prctl(step: str, option: int, value: int, pointer: object = None) -> None:
    zero = ctypes.c_ulong(0)
    second = zero if pointer is None else pointer
    _check(step, _libc.prctl(option, ctypes.c_ulong(value), second, zero, zero))


def close_sandbox(machine: Machine, proc: int) -> None:
    """Leave the caller's namespaces, user and files; what is left is read-only.

    Args:
        machine: what the new root folder holds.
        proc: descriptor of ``/proc``, which is out of reach afterwards.

    Raises:
        StepError: names the isolation that cannot be had.
    """
    if os.getuid() == 0:
        # root may have to read an interpreter that nobody else may, so the folder comes first
        _check("mount namespace", _libc.unshare(_NEW_MOUNTS))
        _build_root(machine)
        try:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        except OSError as error:
            raise StepError(f"user {_NOBODY}, which root gives way to: {error.strerror}") from error
        # a process that changed its user may not write its own maps otherwise
        _prctl("user namespace: dumpable", _PR_SET_DUMPABLE, 1)
        _enter_namespaces(proc)
    else:
        _enter_namespaces(proc)
        _build_root(machine)


def _enter_namespaces(proc: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    flags = _NEW_USER | _NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC | _NEW_HOST_NAME | _NEW_CGROUP
    _check("user, process, network, IPC and host name namespaces", _libc.unshare(flags))
    map_user(proc, uid, gid)


def map_user(proc: int, uid: int, gid: int) -> None:
    """Become the only user of one's new user namespace, under the same number as outside."""
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


def _build_root(machine: Machine) -> None:
    """Change into a root folder that holds the libraries, and nothing that can be written."""
    _mount("mount namespace: private mounts", None, "/", None, _MS_REC | _MS_PRIVATE)
    mount_tmpfs("/tmp", _ROOT_BYTES)  # noqa: S108 - covered in this namespace only
    os.chdir("/tmp")  # noqa: S108
    os.mkdir("old")
    os.mkdir("new")
    _pivot("old")
    os.chdir("/")
    mount_tmpfs("/new", _ROOT_BYTES)
    for link, target in machine["links"]:
        os.makedirs(os.path.dirname(f"/new{link}"), exist_ok=True)
        os.symlink(target, f"/new{link}")
    for path in machine["binds"]:
        _bind(path, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    for path in machine["hidden"]:
        mount_tmpfs(f"/new{path}", 4096)
    for path in machine["libraries"]:
        _bind(path, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    for path in machine["hidden"]:
        _set_mount(f"/new{path}", _ATTR_RDONLY, recursive=False)
    for path in machine["devices"]:
        _bind(path, _ATTR_RDONLY | _ATTR_NOSUID)
    os.makedirs(f"/new{machine['folder']}")
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


def require_own_memory(proc: int) -> None:
    """Refuse to be copied with writable memory that the copies would share with this process.

    Raises:
        StepError: shows the mapping.
    """
    with open(os.open("self/maps", os.O_RDONLY, dir_fd=proc), encoding="utf-8") as maps:
        for mapping in maps:
            permissions = mapping.split()[1]
            if "w" in permissions and "s" in permissions:
                raise StepError(f"memory that is not shared: there is {mapping.strip()}")


def fork_into_namespaces() -> int:
    """Fork into new namespaces of users, processes, mounts and IPC; 0 in the first process there.

    Raises:
        StepError: if there can be no more of them.
    """
    flags = _NEW_USER | _NEW_PIDS | _NEW_MOUNTS | _NEW_IPC | _SIGCHLD
    number = _SYS_CLONE[os.uname().machine]
    step = "user, process, mount and IPC namespaces of a program"
    return _check(step, _libc.syscall(number, ctypes.c_ulong(flags), 0, 0, 0, 0))


def open_process(pid: int) -> int:
    """A descriptor that becomes readable when the process has ended."""
    return _check("descriptors of processes", _libc.syscall(_SYS_PIDFD_OPEN, pid, 0))


def close_from(first: int) -> None:
    """Close all descriptors from a number on."""
    every = ctypes.c_uint(0xFFFFFFFF)
    _check("closed files", _libc.syscall(_SYS_CLOSE_RANGE, ctypes.c_uint(first), every, 0))


def end_with_parent() -> None:
    """Be killed when the parent process ends."""
    _prctl("death signal", _PR_SET_PDEATHSIG, _SIGKILL)


def set_interrupt_handler(handler: int | None) -> int | None:
    """What SIGINT does, as an address, None for the kernel's default; returns what it did before.

    Python's own table of handlers stays as it is.
    """
    before: int | None = _libc.signal(_SIGINT, ctypes.c_void_p(handler))
    return before


def drop_capabilities() -> None:
    """Give up what the creator of a user namespace may do in it."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _check("capabilities", _libc.capset(header, (ctypes.c_uint32 * 6)()))


class SystemCallFilter:
    """A seccomp filter that is ready to be installed."""

    def __init__(self, instructions: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(instructions, len(instructions))
        self._program = _FilterProgram(len(instructions) // 8, ctypes.addressof(self._buffer))

    def install(self) -> None:
        """Refuse what the filter refuses, and gain no privilege by the start of any program."""
        _prctl("no new privileges", _PR_SET_NO_NEW_PRIVS, 1)
        pointer = ctypes.byref(self._program)
        _prctl("seccomp filter", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, pointer)
