"""A filter of system calls for code that nobody has read.

Code in a sandbox has its own namespaces and sees no file of its caller's; the filter takes away
what it could use against the kernel itself, or to keep memory that no limit counts. It is a list of
what is refused, since Python and the libraries that code imports need too much to list the rest.

The numbers are those of Linux' ``asm/unistd_64.h`` (x86_64) and ``asm-generic/unistd.h`` (aarch64);
the instructions are classic BPF (``linux/bpf_common.h``, ``linux/seccomp.h``).
"""

import errno
import struct

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_REFUSED: dict[str, tuple[int, int]] = {
    # other processes' memory
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "open_by_handle_at": (304, 265),
    # sockets of any kind; pairs of connected ones are left, but get no name: programs have their
    # network namespace, and the names in it, in common
    "socket": (41, 198),
    "bind": (49, 200),
    "connect": (42, 203),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # what other programs open in the libraries; aarch64 has no inotify_init
    "inotify_init": (253, 26),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    # memory and queues that outlive a process or count towards no limit
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # parts of the kernel with a history
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_AF_UNIX = 1
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_CLONE_NEW_ANYTHING = 0x7E020000
_X32_BIT = 0x40000000

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16


def seccomp_filter(machine: str) -> bytes:
    """The filter's instructions, 8 bytes each.

    Args:
        machine: as `os.uname` names it.

    Raises:
        KeyError: for a machine whose numbers are not known here.
    """
    column = list(_ARCHITECTURES).index(machine) if machine in _ARCHITECTURES else None
    if column is None:
        raise KeyError(machine)
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_EQUAL, _ARCHITECTURES[machine], jump_true=1),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
        *_if(_JUMP_AT_LEAST, _X32_BIT, _KILL_PROCESS),
        # glibc falls back to clone, whose flags can be looked at
        *_if(_JUMP_EQUAL, _CLONE3, _ERRNO | errno.ENOSYS),
    ]
    for numbers in _REFUSED.values():
        program += _if(_JUMP_EQUAL, numbers[column], _ERRNO | errno.EPERM)
    program += [
        _instruction(_JUMP_EQUAL, _SOCKETPAIR[machine], jump_false=4),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_JUMP_EQUAL, _AF_UNIX, jump_true=1),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
        _instruction(_JUMP_EQUAL, _CLONE[machine], jump_true=1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        *_if(_JUMP_ANY_BIT, _CLONE_NEW_ANYTHING, _ERRNO | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _if(test: int, value: int, action: int) -> list[bytes]:
    return [_instruction(test, value, jump_false=1), _instruction(_RETURN, action)]


def _instruction(code: int, value: int, *, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, value)
