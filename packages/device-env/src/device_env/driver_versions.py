"""Versions of drivers and toolkits, read from where the vendors put them; None where they do not.

Sources: NVIDIA driver README, "The NVIDIA /proc interface"; Linux, /sys/module; Ascend driver
and CANN toolkit installation guides (version.info, ascend_toolkit_install.info).
"""

import re
from collections.abc import Mapping
from pathlib import Path

_NVIDIA = Path("/proc/driver/nvidia/version")
_AMD = Path("/sys/module/amdgpu/version")
_ASCEND = Path("/usr/local/Ascend/driver/version.info")


def nvidia_driver(file: Path = _NVIDIA) -> str | None:
    """Version of the kernel module: `NVRM version: NVIDIA UNIX ... Module  580.159.04  ...`."""
    return _find(file, r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s")


def amd_driver(file: Path = _AMD) -> str | None:
    """Version of amdgpu's own package; None for the module that comes with the kernel."""
    return _find(file, r"(\S+)")


def ascend_driver(file: Path = _ASCEND) -> str | None:
    """Version of the Ascend driver: `Version=25.2.0`."""
    return _find(file, r"^[Vv]ersion=(\S+)")


def cann_toolkit(environ: Mapping[str, str]) -> str | None:
    """Version of the CANN toolkit that the environment points to, by its installation note."""
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if variable in environ:
            for file in sorted(Path(environ[variable]).glob("*-linux/ascend_toolkit_install.info")):
                return _find(file, r"^version=(\S+)")
    return None


def _find(file: Path, pattern: str) -> str | None:
    if not file.is_file():
        return None
    found = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    return None if found is None else found.group(1)
