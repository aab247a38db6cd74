"""What variables mean together, with the configuration, and on a kind of device.

Each rule is a function of what is known; it stays silent where a fact that it needs is not.
"""

from collections.abc import Callable, Mapping
from typing import Literal, final

import attrs
from packaging.version import InvalidVersion, Version

from device_env.device import DeviceKind
from device_env.errors import VisibleDevicesError
from device_env.findings import Finding
from device_env.visible import visible_devices

_AIV_EXEC_TIMEOUT_MAX = 1091
_CONNECT_TIMEOUT_DEFAULT = 120
_EXEC_TIMEOUT_DEFAULT = 1836
_LAST_TO_ASSERT = Version("0.18.0")
_OWN_VARIABLE: Mapping[DeviceKind, str] = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "rocm": "HIP_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
}
_VISIBLE_READERS: Mapping[str, tuple[DeviceKind, ...]] = {
    "CUDA_VISIBLE_DEVICES": ("cuda", "rocm"),
    "HIP_VISIBLE_DEVICES": ("rocm",),
    "ROCR_VISIBLE_DEVICES": ("rocm",),
    "ASCEND_RT_VISIBLE_DEVICES": ("npu",),
}
_ALLOCATORS_OF_TORCH = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_TORCH_NPU_DOC = "torch_npu documentation, HCCL_ASYNC_ERROR_HANDLING"


def check_seconds(seconds: float) -> float:
    """A number of seconds that is one.

    Raises:
        ValueError: it is not positive, or not a number.
    """
    if not seconds > 0:
        raise ValueError(f"expected a positive number of seconds, got {seconds:g}")
    return seconds


@final
@attrs.frozen(kw_only=True)
class RunFacts:
    """What a run's configuration says that decides what variables mean. None: not told."""

    training_engine: Literal["fsdp", "veomni", "megatron"] | None = None
    """The engine that trains."""

    enforce_eager: bool | None = None
    """Whether vLLM runs without captured graphs."""

    sleep_mode: bool | None = None
    """Whether the sampler gives its memory back between rollouts."""

    online_weight_update: bool | None = None
    """Whether new weights are loaded into a running sampler, as RL does."""

    weight_nz_mode: int | None = None
    """vllm-ascend's `additional_config.weight_nz_mode`, where it is set."""

    process_group_timeout_s: float | None = attrs.field(default=None)
    """Timeout in seconds of torch.distributed's process group."""

    @process_group_timeout_s.validator
    def _check_timeout(self, _: "attrs.Attribute[float | None]", seconds: float | None) -> None:
        if seconds is not None:
            check_seconds(seconds)


@final
@attrs.frozen(kw_only=True)
class Situation:
    """Everything that a rule may look at."""

    environ: Mapping[str, str]
    """The environment under check."""

    versions: Mapping[str, str]
    """Versions by distribution name."""

    device_kind: DeviceKind | None
    """The device, where it is known."""

    facts: RunFacts
    """The configuration, where it is known."""


@final
@attrs.frozen(kw_only=True)
class Rule:
    """One way in which variables depend on each other or on the run."""

    variables: tuple[str, ...]
    """The variables that it is about."""

    text: str
    """The rule in one sentence."""

    source: str
    """Where it is from."""

    check: Callable[[Situation], Finding | None]
    """Applies it."""


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    """Value of an integer variable; None when unset or when the domain check refuses it."""
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else None


def _aiv(situation: Situation) -> bool:
    return situation.environ.get("HCCL_OP_EXPANSION_MODE") == "AIV"


def _aiv_clamps_timeout(situation: Situation) -> Finding | None:
    timeout = _integer(situation.environ, "HCCL_EXEC_TIMEOUT")
    if not _aiv(situation) or timeout is None or timeout <= _AIV_EXEC_TIMEOUT_MAX:
        return None
    return Finding(
        level="error",
        variable="HCCL_EXEC_TIMEOUT",
        message=f"{timeout} s becomes {_AIV_EXEC_TIMEOUT_MAX} s under HCCL_OP_EXPANSION_MODE=AIV",
        fix=f"set it to {_AIV_EXEC_TIMEOUT_MAX} or less, or unset HCCL_OP_EXPANSION_MODE",
    )


def _process_group_outlasts_hccl(situation: Situation) -> Finding | None:
    group = situation.facts.process_group_timeout_s
    if group is None:
        return None
    waits = {
        name: (value, "")
        for name in ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT")
        if (value := _integer(situation.environ, name)) is not None
    }
    if situation.device_kind == "npu":
        default = _AIV_EXEC_TIMEOUT_MAX if _aiv(situation) else _EXEC_TIMEOUT_DEFAULT
        waits.setdefault("HCCL_CONNECT_TIMEOUT", (_CONNECT_TIMEOUT_DEFAULT, ", its default"))
        waits.setdefault("HCCL_EXEC_TIMEOUT", (default, ", its default"))
    if not waits:
        return None
    name = max(waits, key=lambda key: waits[key][0])
    longest, how = waits[name]
    if group > longest:
        return None
    return Finding(
        level="error",
        variable=name,
        message=f"the process group gives up after {group:g} s, before {name}={longest} s{how}",
        fix=f"give the process group more than {longest} s, or lower {name}",
    )


def _task_queue_with_graph(situation: Situation) -> Finding | None:
    if (
        situation.environ.get("TASK_QUEUE_ENABLE") != "2"
        or situation.facts.enforce_eager is not False
    ):
        return None
    return Finding(
        level="error",
        variable="TASK_QUEUE_ENABLE",
        message="2 does not work with ACL graph (enforce_eager is False)",
        fix="set TASK_QUEUE_ENABLE=1, or enforce_eager=True",
    )


def _blocking_launch_stops_queue(situation: Situation) -> Finding | None:
    queue = situation.environ.get("TASK_QUEUE_ENABLE")
    if situation.environ.get("ASCEND_LAUNCH_BLOCKING") != "1" or queue in {None, "0"}:
        return None
    return Finding(
        level="warning",
        variable="TASK_QUEUE_ENABLE",
        message=f"{queue} has no effect while ASCEND_LAUNCH_BLOCKING=1",
        fix="unset ASCEND_LAUNCH_BLOCKING (it is for debugging), or unset TASK_QUEUE_ENABLE",
    )


def _allocator(situation: Situation) -> dict[str, str]:
    text = situation.environ.get("PYTORCH_NPU_ALLOC_CONF", "")
    pairs = (part.partition(":") for part in text.split(",") if part.strip())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _expandable(situation: Situation) -> bool:
    return _allocator(situation).get("expandable_segments", "").lower() == "true"


def _expandable_segments_alone(situation: Situation) -> Finding | None:
    others = {"max_split_size_mb", "garbage_collection_threshold"} & _allocator(situation).keys()
    if not _expandable(situation) or not others:
        return None
    return Finding(
        level="error",
        variable="PYTORCH_NPU_ALLOC_CONF",
        message=f"expandable_segments:True excludes {' and '.join(sorted(others))}",
        fix="keep one of them",
    )


def _expandable_segments_asleep(situation: Situation) -> Finding | None:
    if not _expandable(situation) or situation.facts.sleep_mode is not True:
        return None
    return Finding(
        level="error",
        variable="PYTORCH_NPU_ALLOC_CONF",
        message="vllm-ascend's sleep mode asserts that expandable_segments is off",
        fix="remove expandable_segments, or turn sleep mode off",
    )


def _one_allocator_variable(situation: Situation) -> Finding | None:
    if not {"PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} <= situation.environ.keys():
        return None
    version = situation.versions.get("torch-npu")
    if version is not None and Version(version) < Version("2.11"):
        return Finding(
            level="warning",
            variable="PYTORCH_ALLOC_CONF",
            message=f"torch_npu {version} reads PYTORCH_NPU_ALLOC_CONF only",
            fix="unset PYTORCH_ALLOC_CONF",
        )
    return Finding(
        level="error",
        variable="PYTORCH_NPU_ALLOC_CONF",
        message="set together with PYTORCH_ALLOC_CONF, which torch_npu 2.11 and later refuses",
        fix="unset one of the two",
    )


def _two_allocator_variables(situation: Situation) -> Finding | None:
    neutral, cuda = (situation.environ.get(name) for name in _ALLOCATORS_OF_TORCH)
    if situation.device_kind == "npu" or neutral is None or cuda is None or neutral == cuda:
        return None
    return Finding(
        level="error",
        variable="PYTORCH_CUDA_ALLOC_CONF",
        message=f"{cuda!r} differs from PYTORCH_ALLOC_CONF={neutral!r}, and torch's allocator and "
        "vllm do not take the same one of the two",
        fix="unset one of the two",
    )


def _nvls_needs_cumem(situation: Situation) -> Finding | None:
    environ = situation.environ
    if environ.get("NCCL_CUMEM_ENABLE") != "0" or environ.get("NCCL_NVLS_ENABLE", "0") == "0":
        return None
    return Finding(
        level="error",
        variable="NCCL_NVLS_ENABLE",
        message=f"{environ['NCCL_NVLS_ENABLE']} has no effect while NCCL_CUMEM_ENABLE=0",
        fix="unset NCCL_CUMEM_ENABLE, or set NCCL_NVLS_ENABLE=0",
    )


def _cuda_expandable_segments_asleep(situation: Situation) -> Finding | None:
    value = situation.environ.get("PYTORCH_CUDA_ALLOC_CONF", "").replace(" ", "")
    version = situation.versions.get("vllm")
    asserts = version is not None and Version(version) <= _LAST_TO_ASSERT
    asleep = situation.facts.sleep_mode is True and situation.device_kind != "npu"
    if not (asserts and asleep and "expandable_segments:True" in value):
        return None
    return Finding(
        level="error",
        variable="PYTORCH_CUDA_ALLOC_CONF",
        message=f"the sleep mode of vllm {version} asserts that expandable_segments is off",
        fix="remove expandable_segments, or turn sleep mode off",
    )


def _deterministic_turns_aiv_off(situation: Situation) -> Finding | None:
    value = situation.environ.get("HCCL_DETERMINISTIC")
    if not _aiv(situation) or value not in {"true", "strict"}:
        return None
    return Finding(
        level="error",
        variable="HCCL_OP_EXPANSION_MODE",
        message=f"AIV is off while HCCL_DETERMINISTIC={value}",
        fix="unset HCCL_OP_EXPANSION_MODE, or set HCCL_DETERMINISTIC=false",
    )


def _vllm_version_is_the_installed(situation: Situation) -> Finding | None:
    claimed, installed = situation.environ.get("VLLM_VERSION"), situation.versions.get("vllm")
    if claimed is None or installed is None:
        return None
    try:
        same = Version(claimed).public == Version(installed).public
    except InvalidVersion:
        same = False
    if same:
        return None
    return Finding(
        level="error",
        variable="VLLM_VERSION",
        message=f"vllm-ascend would take the code paths of {claimed}, but vllm is {installed}",
        fix=f"unset VLLM_VERSION, or set it to {Version(installed).public}",
    )


def _max_connections(situation: Situation) -> Finding | None:
    value = situation.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value is None:
        return None
    if situation.device_kind == "npu":
        return Finding(
            level="warning",
            variable="CUDA_DEVICE_MAX_CONNECTIONS",
            message="has no meaning on an NPU",
            fix="remove it",
        )
    engine = situation.facts.training_engine
    if value == "1" and engine in {"fsdp", "veomni"}:
        return Finding(
            level="error",
            variable="CUDA_DEVICE_MAX_CONNECTIONS",
            message=f"1 keeps the communication of {engine} (FSDP2) from overlapping with compute",
            fix="remove it; only Megatron's tensor and sequence parallelism wants 1",
        )
    return None


def _nz_off_for_weight_update(situation: Situation) -> Finding | None:
    facts, value = situation.facts, situation.environ.get("VLLM_ASCEND_ENABLE_NZ", "1")
    concerned = "vllm-ascend" in situation.versions and facts.online_weight_update is True
    if not concerned or facts.weight_nz_mode is not None or value == "0":
        return None
    is_set = "VLLM_ASCEND_ENABLE_NZ" in situation.environ
    return Finding(
        level="error",
        variable="VLLM_ASCEND_ENABLE_NZ",
        message=f"{value if is_set else 'unset, hence 1,'} casts weights to a layout that "
        "in-place weight updates cannot write",
        fix="set VLLM_ASCEND_ENABLE_NZ=0, or additional_config.weight_nz_mode",
    )


def _visible_devices_agree(situation: Situation) -> Finding | None:
    if situation.device_kind is None:
        return None
    try:
        visible = visible_devices(situation.device_kind, situation.environ)
    except VisibleDevicesError as error:
        return Finding(
            level="error",
            variable="visible devices",
            message=str(error),
            fix="keep the one variable that says what you mean",
        )
    if not visible.notes:
        return None
    return Finding(
        level="note",
        variable=visible.variable or "",
        message="; ".join(visible.notes),
        fix="keep one of the two variables, unless that is meant",
    )


def _ray_wants_hip(situation: Situation) -> Finding | None:
    environ = situation.environ
    if (
        situation.device_kind != "rocm"
        or "ray" not in situation.versions
        or "ROCR_VISIBLE_DEVICES" not in environ
        or "HIP_VISIBLE_DEVICES" in environ
    ):
        return None
    return Finding(
        level="error",
        variable="ROCR_VISIBLE_DEVICES",
        message="Ray raises when ROCR_VISIBLE_DEVICES is set and HIP_VISIBLE_DEVICES is not",
        fix=f"use HIP_VISIBLE_DEVICES={environ['ROCR_VISIBLE_DEVICES']} instead",
    )


def _variable_of_another_kind(situation: Situation) -> Finding | None:
    kind, environ = situation.device_kind, situation.environ
    if kind is None or kind == "cpu":
        return None
    for name, readers in _VISIBLE_READERS.items():
        # the empty text is what Ray gives to workers without a GPU, whatever the host has
        if kind not in readers and environ.get(name):
            return Finding(
                level="warning",
                variable=name,
                message=f"{environ[name]!r} chooses no device: nobody reads it on {kind}",
                fix=f"use {_OWN_VARIABLE[kind]}, or remove it",
            )
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        variables=("HCCL_EXEC_TIMEOUT", "HCCL_OP_EXPANSION_MODE"),
        text="HCCL_OP_EXPANSION_MODE=AIV silently clamps HCCL_EXEC_TIMEOUT to 1091 s",
        source="CANN 8.5 reference, HCCL_EXEC_TIMEOUT",
        check=_aiv_clamps_timeout,
    ),
    Rule(
        variables=("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"),
        text="torch's process-group timeout must exceed both HCCL timeouts",
        source=_TORCH_NPU_DOC,
        check=_process_group_outlasts_hccl,
    ),
    Rule(
        variables=("TASK_QUEUE_ENABLE",),
        text="TASK_QUEUE_ENABLE=2 does not go together with ACL graph (enforce_eager=False)",
        source="torch_npu documentation, TASK_QUEUE_ENABLE",
        check=_task_queue_with_graph,
    ),
    Rule(
        variables=("TASK_QUEUE_ENABLE", "ASCEND_LAUNCH_BLOCKING"),
        text="ASCEND_LAUNCH_BLOCKING=1 turns the task queue off",
        source="torch_npu documentation, TASK_QUEUE_ENABLE",
        check=_blocking_launch_stops_queue,
    ),
    Rule(
        variables=("PYTORCH_NPU_ALLOC_CONF",),
        text="expandable_segments:True excludes max_split_size_mb and garbage_collection_threshold",
        source="torch_npu documentation, PYTORCH_NPU_ALLOC_CONF",
        check=_expandable_segments_alone,
    ),
    Rule(
        variables=("PYTORCH_NPU_ALLOC_CONF",),
        text="expandable_segments does not go together with vllm-ascend's sleep mode",
        source="vllm-ascend, vllm_ascend/device_allocator/camem.py",
        check=_expandable_segments_asleep,
    ),
    Rule(
        variables=_ALLOCATORS_OF_TORCH,
        text="PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF must not differ: the CUDA allocator "
        "reads the latter first, vllm the former",
        source="torch 2.13, c10/cuda/CUDAAllocatorConfig.h (and run); vllm 0.32.0, "
        "vllm/device_allocator/alloc_conf.py",
        check=_two_allocator_variables,
    ),
    Rule(
        variables=("PYTORCH_CUDA_ALLOC_CONF",),
        text="expandable_segments does not go together with the sleep mode of vllm up to 0.18.0",
        source="vllm/device_allocator/cumem.py of the wheels 0.11.0, 0.15.0 and 0.18.0; 0.23.0 "
        "and 0.32.0 turn it off around their pool instead",
        check=_cuda_expandable_segments_asleep,
    ),
    Rule(
        variables=("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"),
        text="NVLink SHARP needs cuMem allocation: NCCL_CUMEM_ENABLE=0 turns it off",
        source="NCCL documentation, NCCL_NVLS_ENABLE",
        check=_nvls_needs_cumem,
    ),
    Rule(
        variables=("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        text="torch_npu 2.11 and later refuses both allocator variables; up to 2.10 it ignores "
        "PYTORCH_ALLOC_CONF",
        source="strings in libtorch_npu.so, 2.10.0 and 2.11.0.post3; not run",
        check=_one_allocator_variable,
    ),
    Rule(
        variables=("HCCL_DETERMINISTIC", "HCCL_OP_EXPANSION_MODE"),
        text="HCCL_DETERMINISTIC=true or strict turns AIV off",
        source="CANN 8.5 reference, HCCL_OP_EXPANSION_MODE",
        check=_deterministic_turns_aiv_off,
    ),
    Rule(
        variables=("VLLM_VERSION",),
        text="VLLM_VERSION must be the version of the installed vllm",
        source="vllm-ascend, vllm_ascend/utils.py, vllm_version_is",
        check=_vllm_version_is_the_installed,
    ),
    Rule(
        variables=("CUDA_DEVICE_MAX_CONNECTIONS",),
        text="CUDA_DEVICE_MAX_CONNECTIONS=1 is for Megatron only: FSDP2 must not set it, "
        "an NPU does not know it",
        source="verl, verl/trainer/constants_ppo.py:38-45",
        check=_max_connections,
    ),
    Rule(
        variables=("VLLM_ASCEND_ENABLE_NZ",),
        text="in-place weight updates need VLLM_ASCEND_ENABLE_NZ=0 or weight_nz_mode",
        source="vllm-ascend, docs/source/user_guide/configuration/additional_config.md",
        check=_nz_off_for_weight_update,
    ),
    Rule(
        variables=(
            "HIP_VISIBLE_DEVICES",
            "ROCR_VISIBLE_DEVICES",
            "CUDA_VISIBLE_DEVICES",
            "ASCEND_RT_VISIBLE_DEVICES",
        ),
        text="HIP_ and CUDA_VISIBLE_DEVICES must agree on ROCm, and count within "
        "ROCR_VISIBLE_DEVICES; no device is listed twice",
        source="ROCm documentation, GPU isolation techniques; verl#1465",
        check=_visible_devices_agree,
    ),
    Rule(
        variables=tuple(_VISIBLE_READERS),
        text="each kind of device has a visible-devices variable of its own",
        source="vendors' documentation; ROCm reads CUDA_VISIBLE_DEVICES too",
        check=_variable_of_another_kind,
    ),
    Rule(
        variables=("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        text="Ray refuses ROCR_VISIBLE_DEVICES without HIP_VISIBLE_DEVICES",
        source="ray 2.60.0, ray/_private/accelerators/amd_gpu.py:41-48",
        check=_ray_wants_hip,
    ),
)
"""Every rule across variables, in no order."""
