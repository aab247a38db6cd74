"""The CPU: always there, one device, gloo."""

import os
import platform
from pathlib import Path

from device_env.device import Device


def detect_cpu() -> Device:
    """The processor of this host, with the host's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        kind="cpu",
        count=1,
        names=(_model_name(),),
        memory_bytes=(memory,),
        collective_backend="gloo",
        visible_devices_variable=None,
        torch_device_type="cpu",
    )


def _model_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
