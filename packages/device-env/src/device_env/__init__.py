"""Which accelerator is really there, and which environment variables really take effect."""

from device_env.check import check_environment
from device_env.detect import detect_device
from device_env.device import (
    CollectiveBackend,
    Device,
    DeviceKind,
    Rejection,
    TorchDeviceType,
)
from device_env.doctor import Report, examine
from device_env.domains import Choice, Domain, Flag, Integer, Text
from device_env.environment_snapshot import snapshot
from device_env.errors import (
    DeviceEnvError,
    DeviceNotFoundError,
    EnvFileError,
    ProfileConflictError,
    UnknownVariableError,
    VisibleDevicesError,
)
from device_env.explanation import explain
from device_env.findings import Finding, Level
from device_env.profile import (
    Change,
    Profile,
    Setting,
    apply,
    worker_environment,
    worker_profile,
)
from device_env.registry import Registry, Variable
from device_env.rules import RunFacts
from device_env.visible import VisibleDevices, logical_index, visible_devices
from device_env.vllm_source import names_read_by_installed_vllm, names_read_by_vllm

__all__ = [
    "Change",
    "Choice",
    "CollectiveBackend",
    "Device",
    "DeviceEnvError",
    "DeviceKind",
    "DeviceNotFoundError",
    "Domain",
    "EnvFileError",
    "Finding",
    "Flag",
    "Integer",
    "Level",
    "Profile",
    "ProfileConflictError",
    "Registry",
    "Rejection",
    "Report",
    "RunFacts",
    "Setting",
    "Text",
    "TorchDeviceType",
    "UnknownVariableError",
    "Variable",
    "VisibleDevices",
    "VisibleDevicesError",
    "apply",
    "check_environment",
    "detect_device",
    "examine",
    "explain",
    "logical_index",
    "names_read_by_installed_vllm",
    "names_read_by_vllm",
    "snapshot",
    "visible_devices",
    "worker_environment",
    "worker_profile",
]
