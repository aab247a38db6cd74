"""What a worker of the engine really runs with, as plain values; runs in vLLM's process."""

import os
from enum import Enum

import torch
from vllm.config import VllmConfig as EngineConfig

# part of the report -> attribute of vLLM's resolved config; one that a version lacks is left out
_PARTS = {
    "model": "model_config",
    "cache": "cache_config",
    "parallel": "parallel_config",
    "scheduler": "scheduler_config",
    "load": "load_config",
    "device": "device_config",
    "compilation": "compilation_config",
    "attention": "attention_config",
    "aux_output": "aux_output_config",
}


def report_settings(config: EngineConfig, *, model_runner: object) -> dict[str, dict[str, object]]:
    """Plain values of vLLM's resolved config by part, and what shows only while it runs."""
    parts: dict[str, object] = {"engine": config}
    for part, attribute in _PARTS.items():
        found = getattr(config, attribute, None)
        if found is not None:
            parts[part] = found
    plain = {name: _plain(vars(part)) for name, part in parts.items()}
    plain["worker"] = {"attention_backend": _attention_backend(model_runner)}
    plain["process"] = {"id": os.getpid(), "torch_threads": torch.get_num_threads()}
    return plain


def _plain(values: dict[str, object]) -> dict[str, object]:
    plain: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, torch.dtype):
            plain[key] = str(value).removeprefix("torch.")
        elif isinstance(value, Enum):
            plain[key] = value.name
        elif isinstance(value, bool | int | float | str | None):
            plain[key] = value
    return plain


def _attention_backend(model_runner: object) -> str | None:
    """Name of the kernels of all attention layers; None if this vLLM does not show them."""
    groups = getattr(model_runner, "attn_groups", None)
    if not groups:
        return None
    names = sorted({group.backend.get_name() for layer in groups for group in layer})
    return ", ".join(names)
