"""The value that says which accelerator is there; no vendor is imported here."""

from typing import Literal, final

import attrs

DeviceKind = Literal["cuda", "rocm", "npu", "cpu"]
"""The four kinds of device; `rocm` is AMD's, although torch calls its devices `cuda`."""

DEVICE_KINDS: tuple[DeviceKind, ...] = ("cuda", "rocm", "npu", "cpu")
"""In the order in which detection looks for them."""

CollectiveBackend = Literal["nccl", "hccl", "gloo"]
"""A backend name of torch.distributed; RCCL answers to `nccl`."""

TorchDeviceType = Literal["cuda", "npu", "cpu"]
"""What `torch.device(...)` takes."""


@final
@attrs.frozen(kw_only=True)
class Rejection:
    """A kind of device that was looked for and is not usable."""

    kind: DeviceKind
    """What was looked for."""

    reason: str
    """Why it does not count, in words that say what is missing."""


@final
@attrs.frozen(kw_only=True)
class Device:
    """What one process can compute on."""

    kind: DeviceKind
    """The vendor's kind."""

    count: int = attrs.field(validator=attrs.validators.ge(1))
    """Devices that this process sees; a CPU is one device whatever its cores."""

    names: tuple[str, ...]
    """Model name of each device, as the vendor reports it."""

    memory_bytes: tuple[int, ...]
    """Total memory of each device in bytes; for a CPU that of the host."""

    collective_backend: CollectiveBackend
    """Name of the torch.distributed backend for tensors on this device."""

    visible_devices_variable: str | None
    """Environment variable that chooses devices of this kind here; None for a CPU."""

    torch_device_type: TorchDeviceType
    """Device type in torch; `cuda` for ROCm too."""

    driver_version: str | None = None
    """Version of the kernel driver; None for a CPU, or where the vendor's file is not there."""

    toolkit_version: str | None = None
    """Version of CUDA or ROCm that torch is built with, or of CANN; None for a CPU."""

    rejected: tuple[Rejection, ...] = ()
    """Kinds that were looked for before this one, and why they do not count."""

    notes: tuple[str, ...] = ()
    """What is legal but worth knowing, such as two variables that choose devices together."""

    def __attrs_post_init__(self) -> None:
        """Refuse a value whose parts disagree about the number of devices."""
        if not self.count == len(self.names) == len(self.memory_bytes):
            message = (
                f"Device: expected one name and one memory size per device, got {self.count} "
                f"devices, {len(self.names)} names and {len(self.memory_bytes)} sizes"
            )
            raise ValueError(message)
