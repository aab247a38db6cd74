"""NVIDIA GPUs, and what CUDA and ROCm builds of torch have in common."""

import warnings
from collections.abc import Mapping
from types import ModuleType

import attrs

from device_env.device import Device, Rejection
from device_env.driver_versions import nvidia_driver
from device_env.torch_build import VENDOR_ERRORS, TorchUnavailable, import_torch
from device_env.visible import VisibleDevices, visible_devices


def detect_cuda(environ: Mapping[str, str]) -> Device | Rejection:
    """NVIDIA GPUs of this process, or why there are none."""
    torch = import_torch()
    if isinstance(torch, TorchUnavailable):
        return Rejection(kind="cuda", reason=torch.reason)
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA"
        return Rejection(kind="cuda", reason=reason)
    visible = visible_devices("cuda", environ)
    gpus = find_gpus(torch, visible, environ)
    if isinstance(gpus, str):
        return Rejection(kind="cuda", reason=gpus)
    return Device(
        kind="cuda",
        count=len(gpus.names),
        names=gpus.names,
        memory_bytes=gpus.memory_bytes,
        collective_backend="nccl",
        visible_devices_variable=visible.variable,
        torch_device_type="cuda",
        driver_version=nvidia_driver(),
        toolkit_version=str(torch.version.cuda),
        notes=visible.notes,
    )


@attrs.frozen(kw_only=True)
class Gpus:
    """What torch.cuda reports of the devices it sees."""

    names: tuple[str, ...]
    memory_bytes: tuple[int, ...]


def find_gpus(torch: ModuleType, visible: VisibleDevices, environ: Mapping[str, str]) -> Gpus | str:
    """Devices behind `torch.cuda`, or the reason why there are none.

    Reading names and sizes initialises the vendor's runtime in this process: worker
    processes that compute on the device must be spawned after it, not forked.
    """
    if visible.ids == ():
        return f"{visible.variable}={environ.get(visible.variable or '', '')!r} hides every GPU"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        except VENDOR_ERRORS as error:
            return f"torch {torch.__version__} cannot count devices: {error}"
    said = "; ".join(dict.fromkeys(str(warning.message).splitlines()[0] for warning in caught))
    if count == 0:
        asked = f", {visible.variable}={','.join(visible.ids)}" if visible.ids is not None else ""
        why = f": {said}" if said else "; is the driver loaded, and the device in this container?"
        return f"torch {torch.__version__} sees no device{asked}{why}"
    try:
        properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    except VENDOR_ERRORS as error:
        return f"torch {torch.__version__} counts {count} devices but cannot open them: {error}"
    return Gpus(
        names=tuple(str(found.name) for found in properties),
        memory_bytes=tuple(int(found.total_memory) for found in properties),
    )
