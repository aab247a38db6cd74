"""Cores and shared memory that this process may use."""

import os
import shutil
from pathlib import Path
from typing import final

import attrs

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - measured, never written to
"""Where Linux keeps POSIX shared memory."""


@final
@attrs.frozen(kw_only=True)
class Host:
    """What limits worker processes on this host."""

    cores: int
    """Cores that this process may run on (its affinity)."""

    core_quota: float | None
    """Cores' worth of time that the control group grants; None without a limit."""

    shared_memory_bytes: int | None
    """Size of /dev/shm; None where there is none."""

    shared_memory_free_bytes: int | None
    """Free bytes of /dev/shm."""


def inspect_host(
    *, cpu_max: Path = Path("/sys/fs/cgroup/cpu.max"), shared_memory: Path = SHARED_MEMORY
) -> Host:
    """Look at affinity, control group (version 2) and /dev/shm."""
    usage = shutil.disk_usage(shared_memory) if shared_memory.is_dir() else None
    return Host(
        cores=len(os.sched_getaffinity(0)),
        core_quota=_quota(cpu_max.read_text(encoding="utf-8")) if cpu_max.is_file() else None,
        shared_memory_bytes=None if usage is None else usage.total,
        shared_memory_free_bytes=None if usage is None else usage.free,
    )


def _quota(cpu_max: str) -> float | None:
    """`max 100000` is no limit, `150000 100000` is one core and a half (kernel, cgroup-v2)."""
    quota, period = cpu_max.split()
    return None if quota == "max" else int(quota) / int(period)
