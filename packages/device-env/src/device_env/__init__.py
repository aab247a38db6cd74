"""Which accelerator is really there, and which environment variables really take effect."""

from device_env.check import Judge, check_environment
from device_env.detect import detect_device
from device_env.device import (
    CollectiveBackend,
    Device,
    DeviceKind,
    Rejection,
    TorchDeviceType,
)
from device_env.doctor import Report, examine
from device_env.domains import Choice, Domain, Flag, Integer, IntegerList, Text
from device_env.environment_snapshot import snapshot
from device_env.errors import (
    DeviceEnvError,
    DeviceNotFoundError,
    EnvFileError,
    ProfileConflictError,
    ScriptError,
    UnknownVariableError,
    VisibleDevicesError,
)
from device_env.explanation import explain
from device_env.findings import Finding, Level
from device_env.known_names import NamesOf, known_names, known_versions
from device_env.profile import (
    Change,
    Profile,
    Setting,
    apply,
    layered,
    shell_lines,
    worker_environment,
    worker_profile,
)
from device_env.recipes import RECIPE_NAMES, RECIPES, Recipe, RecipeName, profile_for
from device_env.registry import Registry, Variable
from device_env.rules import RunFacts
from device_env.script_check import LocatedFinding, check_script
from device_env.visible import VisibleDevices, logical_index, visible_devices
from device_env.vllm_source import names_read_by_installed_vllm, names_read_by_vllm
from device_env.workers import (
    PER_WORKER,
    Difference,
    WorkerEnvironment,
    collect,
    compare,
    runtime_env,
)

__all__ = [
    "PER_WORKER",
    "RECIPES",
    "RECIPE_NAMES",
    "Change",
    "Choice",
    "CollectiveBackend",
    "Device",
    "DeviceEnvError",
    "DeviceKind",
    "DeviceNotFoundError",
    "Difference",
    "Domain",
    "EnvFileError",
    "Finding",
    "Flag",
    "Integer",
    "IntegerList",
    "Judge",
    "Level",
    "LocatedFinding",
    "NamesOf",
    "Profile",
    "ProfileConflictError",
    "Recipe",
    "RecipeName",
    "Registry",
    "Rejection",
    "Report",
    "RunFacts",
    "ScriptError",
    "Setting",
    "Text",
    "TorchDeviceType",
    "UnknownVariableError",
    "Variable",
    "VisibleDevices",
    "VisibleDevicesError",
    "WorkerEnvironment",
    "apply",
    "check_environment",
    "check_script",
    "collect",
    "compare",
    "detect_device",
    "examine",
    "explain",
    "known_names",
    "known_versions",
    "layered",
    "logical_index",
    "names_read_by_installed_vllm",
    "names_read_by_vllm",
    "profile_for",
    "runtime_env",
    "shell_lines",
    "snapshot",
    "visible_devices",
    "worker_environment",
    "worker_profile",
]
