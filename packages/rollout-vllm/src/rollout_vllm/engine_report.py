"""What a worker of the engine really runs with, as plain values; runs in vLLM's process."""

import os
from enum import Enum

import torch
from vllm.config import VllmConfig as EngineConfig

from rollout_vllm.plain import flattened

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
    "speculative": "speculative_config",
    "lora": "lora_config",
}
# beginnings of the names of vLLM's methods, for linear layers and for experts, and what our config
# calls them; from vllm/model_executor/layers/quantization/online/fp8.py, 0.23 to 0.32
_QUANTISED = {
    "Fp8PerTensorOnline": "fp8_per_tensor",
    "Fp8PtpcOnline": "fp8_per_channel",
    "Fp8PerBlockOnline": "fp8_per_block",
}
# of layers without weights, those that stay as they are, and the cache's
_PLAIN_METHODS = ("NoneType", "Unquantized", "BaseKVCacheMethod", "Fp8KVCacheMethod")


def report_settings(config: EngineConfig, *, model_runner: object) -> dict[str, dict[str, object]]:
    """Plain values of vLLM's resolved config by part, and what shows only while it runs."""
    parts: dict[str, object] = {"engine": config}
    for part, attribute in _PARTS.items():
        found = getattr(config, attribute, None)
        if found is not None:
            parts[part] = found
    plain = {name: _plain(vars(part)) for name, part in parts.items()}
    plain["hf_config"] = dict(flattened(config.model_config.hf_config.to_dict()))
    plain["worker"] = {
        "attention_backend": _attention_backend(model_runner),
        "quantization": _quantization(getattr(model_runner, "model", None)),
    }
    if config.lora_config is not None:
        plain["lora"]["enable_lora"] = True
        plain["lora"]["target_modules"] = list(config.lora_config.target_modules or ())
    limits = _multimodal_limits(config)
    if limits is not None:
        plain["multimodal"] = limits
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


def _multimodal_limits(config: EngineConfig) -> dict[str, object] | None:
    """Most images and videos in a prompt; None for a model of text alone."""
    multimodal = config.model_config.multimodal_config
    if multimodal is None:
        return None
    return {kind: multimodal.get_limit_per_prompt(kind) for kind in ("image", "video")}


def _quantization(model: torch.nn.Module | None) -> str | None:
    """What the layers' weights are quantised to, in our names or else vLLM's; None: nothing is."""
    if model is None:
        return None
    kinds = {type(getattr(layer, "quant_method", None)).__name__ for layer in model.modules()}
    found = sorted(
        {
            next((name for kind, name in _QUANTISED.items() if method.startswith(kind)), method)
            for method in kinds
            if not method.startswith(_PLAIN_METHODS)
        }
    )
    return ", ".join(found) or None


def _attention_backend(model_runner: object) -> str | None:
    """Name of the kernels of all attention layers; None if this vLLM does not show them."""
    groups = getattr(model_runner, "attn_groups", None)
    if not groups:
        return None
    names = sorted({group.backend.get_name() for layer in groups for group in layer})
    return ", ".join(names)
