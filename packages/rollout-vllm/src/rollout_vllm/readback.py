"""Compares what the running engine reports with what it was asked for."""

from collections.abc import Mapping

from rollout_vllm.arguments import EffectiveArgument, Plain
from rollout_vllm.errors import StartError

# argument -> the part of the report and the name there, where either differs from the argument's
# own (vLLM 0.23 to 0.32)
_ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "scheduling_policy": ("scheduler", "policy"),
    "kv_cache_dtype": ("cache", "cache_dtype"),
    # the configured one is a wish; this is the one whose kernels run
    "attention_backend": ("worker", "attention_backend"),
    # each engine of a dense model believes that it is alone (vllm/v1/engine/core.py)
    "data_parallel_size": ("client", "num_engines"),
    "max_cudagraph_capture_size": ("compilation", "max_cudagraph_capture_size"),
}
# what the engine's resolved config does not hold, and why it need not
_NOT_REPORTED: Mapping[str, str] = {
    "weight_transfer_config": "VllmEngine.prepare_weight_updates fails without it",
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
        described = f"{name} = {argument.value!r} ({argument.origin})"
        found = _found(name, reported)
        if not found or not isinstance(argument.value, Plain):
            problems.append(
                f"{described} cannot be verified: the engine's resolved config holds no plain "
                "value of that name; leave it out"
            )
            continue
        problems += [
            f"{described}, the engine reports {value!r}"
            for value in found
            if value != argument.value
        ]
    if problems:
        raise StartError("vLLM runs something else than was configured: " + "; ".join(problems))


def _found(name: str, reported: Mapping[str, Mapping[str, object]]) -> list[object]:
    """What the report says of an argument, worker by worker."""
    part_name, key = _ELSEWHERE.get(name, (None, name))
    return [
        part[key]
        for title, part in reported.items()
        if key in part and part_name in (None, title.split("@")[0])
    ]
