"""What differs between devices in torch, with the device as an argument.

Built on `torch.accelerator`, which knows CUDA, ROCm and NPU alike but neither the CPU nor
random numbers. Imports torch, so it is not part of `import device_env`; on an NPU torch_npu
must have been imported, as `detect_device` does. The names of the collective backend and of
the visible-devices variable are fields of `Device`.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import final

import attrs
import torch

from device_env.device import Device

_STATUS = Path("/proc/self/status")
_MEMORY_INFO = Path("/proc/meminfo")
_CLEAR_PEAK = "5"


@final
@attrs.frozen(kw_only=True)
class Memory:
    """Memory of one device, in bytes. For a CPU that of the host and of this process."""

    total_bytes: int
    """All there is."""

    free_bytes: int
    """What any process could still take; on Linux hosts what the kernel calls available."""

    allocated_bytes: int
    """What this process's tensors hold; for a CPU what this process holds in all."""

    reserved_bytes: int
    """What torch's caching allocator holds, its free blocks included; a CPU has none."""

    peak_allocated_bytes: int
    """The most that `allocated_bytes` has been since the start or `reset_peak_memory`."""


@final
@attrs.frozen(kw_only=True)
class RandomState:
    """The states of the generators that operations on one device draw from."""

    host: torch.Tensor
    """torch's CPU generator."""

    device: torch.Tensor | None
    """The device's own generator; None for a CPU, where there is only one."""


def torch_device(device: Device, index: int = 0) -> torch.device:
    """`torch.device` of one of the devices; a CPU has no index."""
    _check_index(device, index)
    if device.kind == "cpu":
        return torch.device("cpu")
    return torch.device(device.torch_device_type, index)


def synchronize(device: Device, index: int = 0) -> None:
    """Wait until the device has done all that this process gave it; a CPU always has."""
    _check_index(device, index)
    if device.kind != "cpu":
        torch.accelerator.synchronize(index)


def empty_cache(device: Device) -> None:
    """Give the allocator's free blocks back to the device; a CPU keeps none."""
    if device.kind != "cpu":
        torch.accelerator.empty_cache()


def memory(device: Device, index: int = 0) -> Memory:
    """How much memory there is, and how much of it is taken."""
    _check_index(device, index)
    if device.kind == "cpu":
        return _host_memory()
    free, total = torch.accelerator.get_memory_info(index)
    return Memory(
        total_bytes=total,
        free_bytes=free,
        allocated_bytes=torch.accelerator.memory_allocated(index),
        reserved_bytes=torch.accelerator.memory_reserved(index),
        peak_allocated_bytes=torch.accelerator.max_memory_allocated(index),
    )


def reset_peak_memory(device: Device, index: int = 0) -> None:
    """Let `Memory.peak_allocated_bytes` count from what is allocated now."""
    _check_index(device, index)
    if device.kind == "cpu":
        # proc(5), /proc/pid/clear_refs: 5 resets the peak resident set
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK, encoding="ascii")
    else:
        torch.accelerator.reset_peak_memory_stats(index)


@contextmanager
def side_stream(device: Device, index: int = 0) -> Iterator[torch.Stream | None]:
    """Run the body on a stream of its own, after all that came before and before all that follows.

    On a CPU there are no streams: the body runs in place and gets None.
    """
    _check_index(device, index)
    if device.kind == "cpu":
        yield None
        return
    main = torch.accelerator.current_stream(index)
    side = torch.Stream(torch_device(device, index))
    side.wait_stream(main)
    torch.accelerator.set_stream(side)
    try:
        yield side
    finally:
        torch.accelerator.set_stream(main)
        main.wait_stream(side)


def random_state(device: Device, index: int = 0) -> RandomState:
    """What the next random numbers on this device will come from."""
    place = torch_device(device, index)
    own = None if device.kind == "cpu" else _module(device).get_rng_state(place)
    return RandomState(host=torch.get_rng_state(), device=own)


def set_random_state(device: Device, state: RandomState, index: int = 0) -> None:
    """Go back to a state, so that the same random numbers come again.

    Raises:
        ValueError: the state is of another kind of device.
    """
    place = torch_device(device, index)
    if (state.device is None) != (device.kind == "cpu"):
        has = "no" if state.device is None else "a"
        raise ValueError(f"expected a state of a {device.kind}, got one with {has} device part")
    torch.set_rng_state(state.host)
    if state.device is not None:
        _module(device).set_rng_state(state.device, place)


def autocast_dtype(device: Device) -> torch.dtype:
    """The 16-bit type to compute in: bfloat16 where the hardware has it, else float16."""
    if device.kind == "cpu":
        return torch.bfloat16
    supported: bool = _module(device).is_bf16_supported()
    return torch.bfloat16 if supported else torch.float16


def _check_index(device: Device, index: int) -> None:
    if not 0 <= index < device.count:
        message = f"expected an index below {device.count}, the number of devices, got {index}"
        raise ValueError(message)


def _module(device: Device) -> ModuleType:
    """`torch.cuda` or `torch.npu`."""
    module: ModuleType = torch.get_device_module(device.torch_device_type)
    return module


def _host_memory() -> Memory:
    host, process = _kibibytes(_MEMORY_INFO), _kibibytes(_STATUS)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Memory(
        total_bytes=pages,
        free_bytes=host["MemAvailable"] * 1024,
        allocated_bytes=process["VmRSS"] * 1024,
        reserved_bytes=0,
        peak_allocated_bytes=process["VmHWM"] * 1024,
    )


def _kibibytes(file: Path) -> dict[str, int]:
    """Lines of the form `VmRSS:   1234 kB`."""
    text = file.read_text(encoding="utf-8")
    return {
        name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }
