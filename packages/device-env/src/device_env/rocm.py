"""AMD GPUs: torch calls them `cuda`, and RCCL answers to the backend name `nccl`."""

from collections.abc import Mapping

from device_env.cuda import find_gpus
from device_env.device import Device, Rejection
from device_env.driver_versions import amd_driver
from device_env.torch_build import TorchUnavailable, import_torch
from device_env.visible import visible_devices


def detect_rocm(environ: Mapping[str, str]) -> Device | Rejection:
    """AMD GPUs of this process, or why there are none."""
    torch = import_torch()
    if isinstance(torch, TorchUnavailable):
        return Rejection(kind="rocm", reason=torch.reason)
    if torch.version.hip is None:
        reason = f"torch {torch.__version__} is built without ROCm"
        return Rejection(kind="rocm", reason=reason)
    visible = visible_devices("rocm", environ)
    gpus = find_gpus(torch, visible, environ)
    if isinstance(gpus, str):
        return Rejection(kind="rocm", reason=gpus)
    return Device(
        kind="rocm",
        count=len(gpus.names),
        names=gpus.names,
        memory_bytes=gpus.memory_bytes,
        collective_backend="nccl",
        visible_devices_variable=visible.variable,
        torch_device_type="cuda",
        driver_version=amd_driver(),
        toolkit_version=str(torch.version.hip),
        notes=visible.notes,
    )
