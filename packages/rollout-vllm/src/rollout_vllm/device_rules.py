"""Which settings take effect on which device; consulted when a config is made."""

from collections.abc import Mapping
from typing import Literal

Device = Literal["cpu", "cuda"]
"""`cpu`: vLLM's CPU build. `cuda`: NVIDIA GPUs."""

_COMPILED = (
    "weight updates of compiled models have not been shown to be right there; use True or leave "
    "it out"
)
_SIZES = (
    "vLLM 0.32 crashes in the fused experts there, and needs threads bound to cores for tensor "
    "parallelism; use 1, and several samplers for more"
)
_RECOMPUTE = "recompute them in the trainer"
# setting -> the values that take effect on the device, and why others do not
_RULES: Mapping[Device, Mapping[str, tuple[tuple[object, ...], str]]] = {
    "cpu": {
        "tensor_parallel_size": ((1,), _SIZES),
        "data_parallel_size": ((1,), _SIZES),
        "expert_parallel_size": ((1,), _SIZES),
        "enforce_eager": ((None, True), _COMPILED),
        "attention_backend": ((None,), "vLLM has one kind of attention there; leave it out"),
        "enable_sleep": (
            (False,),
            "vLLM's sleep and wake_up do nothing there (0.32); close the sampler instead",
        ),
    },
    "cuda": {
        "return_routed_experts": (
            (False,),
            f"no engine there has been shown to return them; {_RECOMPUTE}",
        ),
    },
}
# Measured on the CPU against transformers' router: 0.25.1 returns arrays of the right shape that
# agree nowhere, 0.30.0 those of the router, 0.32.0 none.
_EXPERTS_ON_CPU = (0, 30)


def check_device_rules(
    device: Device, settings: Mapping[str, object], *, version: str | None
) -> None:
    """Refuse settings that cannot take effect on this device.

    Args:
        device: what the engine will run on.
        settings: fields of the config that depend on it.
        version: of the installed vLLM, None if there is none.

    Raises:
        ValueError: names all of them, with the reason and what works.
    """
    rules = dict(_RULES[device])
    if device == "cpu" and version is not None and _minor(version) != _EXPERTS_ON_CPU:
        reason = f"vLLM {version} returns none or wrong ones there; use 0.30, or {_RECOMPUTE}"
        rules["return_routed_experts"] = ((False,), reason)
    where = {"cpu": "the CPU", "cuda": "a GPU"}[device]
    problems = [
        f"{name} = {settings[name]!r} cannot run on {where} in this release: {reason}"
        for name, (accepted, reason) in rules.items()
        if settings[name] not in accepted
    ]
    if problems:
        raise ValueError("VllmConfig: " + "; ".join(problems))


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
