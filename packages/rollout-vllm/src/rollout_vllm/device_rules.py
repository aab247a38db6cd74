"""Which settings take effect on which device; consulted when a config is made."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

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
_NOT_RUN = (
    "it has not run there, and nothing shows that logprobs and weight updates are right with it; "
    "leave it out"
)
# setting -> the values that take effect on the device, and why others do not
_RULES: Mapping[Device, Mapping[str, tuple[tuple[object, ...], str]]] = {
    "cpu": {
        "tensor_parallel_size": ((1,), _SIZES),
        "data_parallel_size": ((1,), _SIZES),
        "expert_parallel_size": ((1,), _SIZES),
        "enforce_eager": ((None, True), _COMPILED),
        "attention_backend": ((None,), "vLLM has one kind of attention there; leave it out"),
        "quantization": (
            (None, "fp8_per_channel"),
            "vLLM's CPU build has no kernel that scales weights this way; use 'fp8_per_channel'",
        ),
        "enable_sleep": (
            (False,),
            "vLLM's sleep and wake_up do nothing there (0.32); close the sampler instead",
        ),
    },
    "cuda": {
        "pipeline_parallel_size": ((1,), _NOT_RUN),
        "quantization": ((None,), _NOT_RUN),
        "speculation": ((None,), _NOT_RUN),
        "return_routed_experts": (
            (False,),
            f"no engine there has been shown to return them; {_RECOMPUTE}",
        ),
    },
}


class _Measured(NamedTuple):
    """What only some versions of vLLM's CPU build do, as measured against transformers."""

    versions: tuple[tuple[int, int], ...]
    off: object
    reason: str


_ON_CPU: Mapping[str, _Measured] = {
    # 0.25.1 returns arrays of the right shape that agree nowhere with the router's choices, 0.30.0
    # those of the router, 0.32.0 none
    "return_routed_experts": _Measured(
        ((0, 30),), False, f"returns none or wrong ones there; use 0.30, or {_RECOMPUTE}"
    ),
    # needs what rollout_vllm.cpu_preparation does
    "pipeline_parallel_size": _Measured(
        ((0, 32),), 1, "has not been shown to run stages there; use 0.32, or leave it out"
    ),
    "quantization": _Measured(
        ((0, 32),),
        None,
        "has not been shown to quantise updates as it quantises the files; use 0.32, or leave it "
        "out",
    ),
    # rollout_vllm.cpu_preparation mends what goes wrong
    "speculation": _Measured(
        ((0, 32),),
        None,
        "has not been shown to draw guessed tokens from the model's distribution there; use 0.32, "
        "or leave it out",
    ),
    "lora": _Measured(
        ((0, 32),),
        None,
        "has not been shown to apply adapters right there; use 0.32, or leave it out",
    ),
}


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
    if device == "cpu" and version is not None:
        for name, measured in _ON_CPU.items():
            if _minor(version) not in measured.versions:
                rules[name] = ((measured.off,), f"vLLM {version} {measured.reason}")
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
