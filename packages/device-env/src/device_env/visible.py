"""Which devices the environment lets a process see.

Ids are opaque: an index, `GPU-...`, `MIG-...`; nothing here turns them into numbers
except where one variable counts within another (HIP within ROCR).

Sources: CUDA programming guide, "CUDA environment variables" (an invalid id hides itself and
all that follow); ROCm documentation, "GPU isolation techniques" (HIP and CUDA variables count
within what ROCR leaves, and CUDA is an alias of HIP).
"""

from collections.abc import Mapping
from typing import assert_never, final

import attrs

from device_env.device import DeviceKind
from device_env.errors import VisibleDevicesError

_HIDES_THE_REST = "-1"


@final
@attrs.frozen(kw_only=True)
class VisibleDevices:
    """What the visible-device variables say for one kind of device."""

    variable: str | None
    """The variable that counts; where several are set, the innermost. None for a CPU."""

    ids: tuple[str, ...] | None
    """Physical ids in logical order; empty when all are hidden, None when nothing is chosen."""

    notes: tuple[str, ...] = ()
    """Legal combinations that are easily misread."""


def visible_devices(kind: DeviceKind, environ: Mapping[str, str]) -> VisibleDevices:
    """Read the visible-device variables that count for this kind.

    Raises:
        VisibleDevicesError: two variables contradict each other, or one lists a device twice.
    """
    match kind:
        case "cuda":
            return _single("CUDA_VISIBLE_DEVICES", environ)
        case "npu":
            return _single("ASCEND_RT_VISIBLE_DEVICES", environ)
        case "rocm":
            return _rocm(environ)
        case "cpu":
            return VisibleDevices(variable=None, ids=None)
        case _:
            assert_never(kind)


def logical_index(visible: VisibleDevices, physical_id: str) -> int:
    """Index by which this process addresses the device with this physical id.

    With nothing chosen, logical and physical indexes are the same; an id that is not an
    index can then not be resolved without the vendor's library, and is refused.
    """
    if visible.ids is None:
        if not physical_id.isdecimal():
            message = (
                f"physical id {physical_id!r} is not an index, and {visible.variable} is not set; "
                f"set {visible.variable} to the ids that this process shall see"
            )
            raise VisibleDevicesError(message)
        return int(physical_id)
    if physical_id not in visible.ids:
        shown = ",".join(visible.ids) or "(no device)"
        message = f"physical id {physical_id!r} is not visible: {visible.variable} shows {shown}"
        raise VisibleDevicesError(message)
    return visible.ids.index(physical_id)


def _single(variable: str, environ: Mapping[str, str]) -> VisibleDevices:
    if variable not in environ:
        return VisibleDevices(variable=variable, ids=None)
    return VisibleDevices(variable=variable, ids=_ids(variable, environ[variable]))


def _rocm(environ: Mapping[str, str]) -> VisibleDevices:
    hip, cuda, rocr = (
        _ids(name, environ[name]) if name in environ else None
        for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    )
    if hip is not None and cuda is not None and hip != cuda:
        message = (
            f"HIP_VISIBLE_DEVICES={environ['HIP_VISIBLE_DEVICES']!r} and "
            f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']!r} choose different GPUs, "
            "and ROCm reads both; unset CUDA_VISIBLE_DEVICES"
        )
        raise VisibleDevicesError(message)
    variable = "CUDA_VISIBLE_DEVICES" if hip is None and cuda is not None else "HIP_VISIBLE_DEVICES"
    inner = cuda if hip is None else hip
    if rocr is None:
        return VisibleDevices(variable=variable, ids=inner)
    if inner is None:
        return VisibleDevices(variable="ROCR_VISIBLE_DEVICES", ids=rocr)
    note = (
        f"ROCR_VISIBLE_DEVICES and {variable} are both set: {variable} counts within "
        "what ROCR_VISIBLE_DEVICES leaves, not among all GPUs of the host"
    )
    return VisibleDevices(
        variable=variable,
        ids=tuple(_within(rocr, index, variable) for index in inner),
        notes=(note,),
    )


def _within(outer: tuple[str, ...], inner_id: str, variable: str) -> str:
    """Physical id behind an id of the inner variable."""
    if not inner_id.isdecimal():
        return inner_id
    if int(inner_id) >= len(outer):
        message = (
            f"{variable} asks for device {inner_id}, but ROCR_VISIBLE_DEVICES="
            f"{','.join(outer)!r} leaves only {len(outer)}, counted from 0"
        )
        raise VisibleDevicesError(message)
    return outer[int(inner_id)]


def _ids(variable: str, value: str) -> tuple[str, ...]:
    ids = [part.strip() for part in value.split(",") if part.strip()]
    if _HIDES_THE_REST in ids:
        ids = ids[: ids.index(_HIDES_THE_REST)]
    if len(set(ids)) != len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        message = f"{variable}={value!r} lists {twice!r} twice; list each device once"
        raise VisibleDevicesError(message)
    return tuple(ids)
