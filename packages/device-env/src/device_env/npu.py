"""Ascend NPUs: a torch_npu that is installed, or even imports, is not yet a device."""

import importlib
from collections.abc import Mapping
from types import ModuleType

from device_env.device import Device, Rejection
from device_env.driver_versions import ascend_driver, cann_toolkit
from device_env.torch_build import (
    VENDOR_ERRORS,
    TorchUnavailable,
    import_torch,
    without_extensions,
)
from device_env.visible import visible_devices

_CANN_HINT = "source CANN's set_env.sh, or uninstall torch_npu on a machine without NPUs"


def detect_npu(environ: Mapping[str, str]) -> Device | Rejection:
    """Ascend NPUs of this process, or why there are none."""
    torch = import_torch()
    if isinstance(torch, TorchUnavailable):
        return Rejection(kind="npu", reason=torch.reason)
    torch_npu = _import_torch_npu()
    if isinstance(torch_npu, str):
        return Rejection(kind="npu", reason=torch_npu)
    visible = visible_devices("npu", environ)
    if visible.ids == ():
        value = environ["ASCEND_RT_VISIBLE_DEVICES"]
        reason = f"ASCEND_RT_VISIBLE_DEVICES={value!r} hides every NPU"
        return Rejection(kind="npu", reason=reason)
    try:
        count = int(torch_npu.npu.device_count())
        names = tuple(str(torch_npu.npu.get_device_name(index)) for index in range(count))
        memory = tuple(
            int(torch_npu.npu.get_device_properties(index).total_memory) for index in range(count)
        )
    except VENDOR_ERRORS as error:
        reason = f"torch_npu imports, but its devices cannot be opened: {error}"
        return Rejection(kind="npu", reason=reason)
    if count == 0:
        asked = "" if visible.ids is None else f", {visible.variable}={','.join(visible.ids)}"
        reason = f"torch_npu imports but sees no device{asked}; is the NPU driver loaded?"
        return Rejection(kind="npu", reason=reason)
    return Device(
        kind="npu",
        count=count,
        names=names,
        memory_bytes=memory,
        collective_backend="hccl",
        visible_devices_variable=visible.variable,
        torch_device_type="npu",
        driver_version=ascend_driver(),
        toolkit_version=cann_toolkit(environ),
        notes=visible.notes,
    )


def _import_torch_npu() -> ModuleType | str:
    """The module, or why it cannot be imported."""
    try:
        with without_extensions():
            return importlib.import_module("torch_npu")
    except ModuleNotFoundError as error:
        if error.name == "torch_npu":
            return "torch_npu is not installed"
        return f"torch_npu cannot be imported: {error}"
    except VENDOR_ERRORS as error:
        return f"torch_npu is installed but cannot be imported: {error}; {_CANN_HINT}"
