"""Which accelerator is really there: asked for, answered once, passed on by the caller."""

import os
from collections.abc import Mapping
from typing import assert_never

import attrs

from device_env.cpu import detect_cpu
from device_env.cuda import detect_cuda
from device_env.device import DEVICE_KINDS, Device, DeviceKind, Rejection
from device_env.errors import DeviceNotFoundError
from device_env.npu import detect_npu
from device_env.rocm import detect_rocm


def detect_device(
    environ: Mapping[str, str] | None = None, *, force: DeviceKind | None = None
) -> Device:
    """Find the device of this process: the first of CUDA, ROCm, NPU and CPU that works.

    A package that is installed or imports is not a device; a device is what the vendor's
    library counts and opens. Nothing is remembered: a second call looks again.

    Args:
        environ: where the visible-device variables are read, by default the environment of
            this process. The vendors' libraries always read the latter, so another mapping
            can hide devices from the answer but not show more.
        force: the only kind to look for.

    Returns:
        The device, with the reasons against every kind that was looked for before it.

    Raises:
        DeviceNotFoundError: `force` names a kind that is not there.
        VisibleDevicesError: the visible-device variables contradict each other.
        ValueError: `force` is no kind of device.
    """
    seen: Mapping[str, str] = os.environ if environ is None else environ
    if force is not None:
        if force not in DEVICE_KINDS:
            raise ValueError(f"unknown device kind {force!r}; known: {', '.join(DEVICE_KINDS)}")
        found = _look_for(force, seen)
        if isinstance(found, Rejection):
            message = f"device kind {force!r} was demanded, but is not there: {found.reason}"
            raise DeviceNotFoundError(message)
        return found
    rejected: list[Rejection] = []
    for kind in DEVICE_KINDS:
        found = _look_for(kind, seen)
        if isinstance(found, Device):
            return attrs.evolve(found, rejected=tuple(rejected))
        rejected.append(found)
    raise AssertionError("a CPU is always found")


def _look_for(kind: DeviceKind, environ: Mapping[str, str]) -> Device | Rejection:
    match kind:
        case "cuda":
            return detect_cuda(environ)
        case "rocm":
            return detect_rocm(environ)
        case "npu":
            return detect_npu(environ)
        case "cpu":
            return detect_cpu()
        case _:
            assert_never(kind)
