"""What of this machine a sandbox shows to programs: Python, the C library, and nothing else."""

import functools
import os
import sys
import sysconfig
from pathlib import Path
from typing import TypedDict

from rl_tasks.seccomp import seccomp_filter

MAIN = "main.py"
"""Name of the program's file."""

_FOLDER = "/sandbox"


class Machine(TypedDict):
    """What a launcher is told at its start."""

    binds: list[str]
    """Files and folders that Python needs, as absolute paths."""
    hidden: list[str]
    """Folders in them that are shown empty."""
    libraries: list[str]
    """Folders of packages that programs may read."""
    links: list[tuple[str, str]]
    """Symbolic links to make: path and what it points to."""
    devices: list[str]
    folder: str
    """Where a program starts and may write."""
    main: str
    """Name of the program's file in it."""
    seccomp: bytes
    """The filter's instructions."""


def interpreter() -> str:
    """The file of this process's Python."""
    return os.path.realpath(sys.executable)


def _packages() -> list[str]:
    """Folders of installed packages; links left out, since what they lead to is not there."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    named = [sysconfig.get_path(name, vars=base) for name in ("purelib", "platlib")]
    named += ["/usr/lib/python3/dist-packages", "/usr/local/lib/python3/dist-packages"]
    return sorted({os.path.realpath(path) for path in named if Path(path).is_dir()})


@functools.cache
def sandbox_machine(libraries: tuple[str, ...]) -> Machine:
    """What a sandbox on this machine holds, with some folders of packages."""
    binds = [interpreter()]
    links: list[tuple[str, str]] = []
    for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        if Path(path).is_symlink():
            links.append((path, str(Path(path).readlink())))
        elif Path(path).is_dir():
            binds.append(path)
    if Path("/etc/ld.so.cache").is_file():
        binds.append("/etc/ld.so.cache")
    own = os.path.realpath(f"{sys.base_prefix}/lib")
    if not any(own == bind or own.startswith(f"{bind}/") for bind in binds):
        binds.append(own)
    return {
        "binds": binds,
        "hidden": [path for path in _packages() if any(path.startswith(f"{b}/") for b in binds)],
        "libraries": list(libraries),
        "links": links,
        "devices": ["/dev/null", "/dev/urandom"],
        "folder": _FOLDER,
        "main": MAIN,
        "seccomp": seccomp_filter(os.uname().machine),
    }
