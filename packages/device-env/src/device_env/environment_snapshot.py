"""The part of an environment that belongs into a run folder: what matters, without secrets."""

import re
from collections.abc import Mapping

from device_env.registry import Registry

_PREFIXES = (
    "ACCELERATE_", "ASCEND_", "ATB_", "CANN_", "CUBLAS_", "CUDA_", "CUDNN_", "FLASH_ATTENTION_",
    "GLOO_", "GOMP_", "HCCL_", "HF_", "HIP_", "HSA_", "KMP_", "LCCL_", "MKL_", "MODELING_",
    "MOONCAKE_", "NCCL_", "NPU_", "NVTE_", "OMP_", "OPENBLAS_", "PYTORCH_", "RAY_",
    "RCCL_", "ROCM_", "ROCR_", "SGLANG_", "SLURM_", "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_",
    "VEOMNI_", "VLLM_",
)  # fmt: skip
_NAMES = (
    "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "NVIDIA_TF32_OVERRIDE", "NVIDIA_VISIBLE_DEVICES",
    "PYTHONHASHSEED", "PYTHONPATH", "RANK", "VIRTUAL_ENV", "WORLD_SIZE",
)  # fmt: skip
_SECRET_PARTS = (
    "KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "AUTH", "COOKIE", "JWT",
)  # fmt: skip
_SECRET_WORDS = frozenset(
    {"BEARER", "CRED", "CREDS", "PASS", "PASSPHRASE", "PAT", "PIN", "PRIVATE", "PWD", "SK"}
)
_SECRET_VALUES = re.compile(
    r"://[^/\s]*@|\w:[^/\s@]+@\w"  # a user in a URL, with or without its scheme
    r"|\b(?:api[-_]?key|access[-_]?key|token|secret|passw(?:or)?d|passphrase|sig)\s*[=:\s]\s*\S"
    r"|\bbearer\s|\b(?:sk|hf|ghp|xox[a-z])[-_]\w{8}",
    re.IGNORECASE,
)


def snapshot(environ: Mapping[str, str], *, registry: Registry | None = None) -> dict[str, str]:
    """Variables that can change what a run does, sorted by name, without secrets.

    Left out: names that contain one of `_SECRET_PARTS` or, as a word, of `_SECRET_WORDS` in any
    case, except those of the registry (TOKENIZERS_PARALLELISM); values that look like a secret
    or like options that hold one; and values that hold further settings (JSON) of which one is
    named like a secret.
    """
    known = Registry.load() if registry is None else registry
    return {
        name: value
        for name, value in sorted(environ.items())
        if _matters(name, known) and not _is_secret(name, value, known)
    }


def shown(name: str, value: str) -> str:
    """A value as it may stand in a message."""
    return "a value that is not shown" if _is_secret(name, value, Registry.load()) else repr(value)


def _matters(name: str, known: Registry) -> bool:
    return name in known or name in _NAMES or name.startswith(_PREFIXES)


def _is_secret(name: str, value: str, known: Registry) -> bool:
    upper = name.upper()
    named = any(part in upper for part in _SECRET_PARTS) or _SECRET_WORDS & set(upper.split("_"))
    nested = "{" in value and any(part in value.upper() for part in _SECRET_PARTS)
    secret = nested or _SECRET_VALUES.search(value) is not None
    return secret or (name not in known and bool(named))
