"""Compares what the running engine reports with what it was asked for."""

from collections.abc import Mapping

from rollout_vllm.arguments import EffectiveArgument
from rollout_vllm.errors import StartError
from rollout_vllm.overrides import TEXT
from rollout_vllm.plain import Plain, flattened

# argument -> the part of the report and the name there, where either differs from the argument's
# own (vLLM 0.23 to 0.32)
_ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "scheduling_policy": ("scheduler", "policy"),
    "kv_cache_dtype": ("cache", "cache_dtype"),
    # the configured ones are wishes; these are those whose kernels run
    "attention_backend": ("worker", "attention_backend"),
    "quantization": ("worker", "quantization"),
    "lora_target_modules": ("lora", "target_modules"),
    # each engine of a dense model believes that it is alone (vllm/v1/engine/core.py)
    "data_parallel_size": ("client", "num_engines"),
    "max_cudagraph_capture_size": ("compilation", "max_cudagraph_capture_size"),
}
# an argument whose value is a table -> the part of the report that holds its entries, under names
# joined by dots
_TABLES: Mapping[str, str] = {
    "hf_overrides": "hf_config",
    "limit_mm_per_prompt": "multimodal",
    "speculative_config": "speculative",
}
# what the engine's resolved config does not hold, and why it need not
_NOT_REPORTED: Mapping[str, str] = {
    "weight_transfer_config": "VllmEngine.prepare fails without it",
    "disable_log_stats": "taken by AsyncLLM in the caller's process, never resolved",
    "enable_log_requests": "taken by AsyncLLM in the caller's process, never resolved",
}


def check_settings(
    asked: Mapping[str, EffectiveArgument], reported: Mapping[str, Mapping[str, object]]
) -> None:
    """Refuse an engine that runs something else than was configured, or does not say.

    Args:
        asked: the arguments that vLLM was given.
        reported: plain values of the engine's resolved config, by part.

    Raises:
        StartError: names every difference: the argument, who set it, and both values; and every
            argument that the report does not hold.
    """
    problems: list[str] = []
    for name, argument in asked.items():
        if name in _NOT_REPORTED:
            continue
        problems += _problems(name, argument, reported)
    if problems:
        raise StartError("vLLM runs something else than was configured: " + "; ".join(problems))


def _problems(
    name: str, argument: EffectiveArgument, reported: Mapping[str, Mapping[str, object]]
) -> list[str]:
    """What differs of one argument, worker by worker."""
    described = f"{name} = {argument.value!r} ({argument.origin})"
    unverified = (
        f"{described} cannot be verified: the engine's resolved config holds no plain value of "
        "that name; leave it out"
    )
    if name in _TABLES:
        parts = [part for title, part in reported.items() if title.split("@")[0] == _TABLES[name]]
        asked = dict(flattened(argument.value))
        return [
            f"{described}, the engine reports {difference}"
            for part in parts
            for difference in _differences(asked, part, complete=name == "hf_overrides")
        ] or ([] if parts else [unverified])
    found = _found(name, reported)
    is_plain = isinstance(argument.value, Plain) or name == "lora_target_modules"
    if not found or not is_plain:
        return [unverified]
    return [
        f"{described}, the engine reports {value!r}" for value in found if value != argument.value
    ]


def _differences(
    asked: Mapping[str, Plain], part: Mapping[str, object], *, complete: bool
) -> list[str]:
    """Entries of a table that differ; if it is complete, those that nobody asked for too."""
    differences = [
        f"{key} = {part[key]!r}" if key in part else f"no {key}"
        for key, value in asked.items()
        if key not in part or part[key] != value
    ]
    if complete:
        # vLLM replaces an entry, but merges one that lies deeper with what the model has
        tables = {_table(key) for key in asked if "." in key.removeprefix(f"{TEXT}.")}
        differences += [
            f"{key} = {value!r} beside it"
            for key, value in part.items()
            if key not in asked and _table(key) in tables
        ]
    return differences


def _table(key: str) -> str:
    """`rope_parameters` of "rope_parameters.factor", with `text_config.` before it if there."""
    inner = key.removeprefix(f"{TEXT}.")
    return key[: len(key) - len(inner)] + inner.split(".")[0]


def _found(name: str, reported: Mapping[str, Mapping[str, object]]) -> list[object]:
    """What the report says of an argument, worker by worker."""
    part_name, key = _ELSEWHERE.get(name, (None, name))
    return [
        part[key]
        for title, part in reported.items()
        # tables have entries of the same names, which are other settings
        if key in part and title.split("@")[0] not in _TABLES.values()
        if part_name in (None, title.split("@")[0])
    ]
