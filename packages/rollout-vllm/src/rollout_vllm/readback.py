"""Compares what the running engine reports with what it was asked for."""

from collections.abc import Mapping

from rollout_vllm.arguments import EffectiveArgument
from rollout_vllm.errors import StartError

# where vLLM keeps an argument in its resolved config, if under another name (vLLM 0.32)
_RENAMED: Mapping[str, str] = {
    "scheduling_policy": "policy",
    "kv_cache_dtype": "cache_dtype",
}
_PLAIN = bool | int | float | str | None


def check_settings(
    asked: Mapping[str, EffectiveArgument], reported: Mapping[str, Mapping[str, object]]
) -> None:
    """Refuse an engine that runs something else than was configured.

    Args:
        asked: the arguments that vLLM was given.
        reported: plain values of the engine's resolved config, by part.

    Raises:
        StartError: names every difference: the argument, who set it, and both values.
    """
    problems: list[str] = []
    for name, argument in asked.items():
        if not isinstance(argument.value, _PLAIN):
            continue
        key = _RENAMED.get(name, name)
        found = [part[key] for part in reported.values() if key in part]
        problems += [
            f"{name} = {argument.value!r} ({argument.origin}), the engine reports {value!r}"
            for value in found
            if value != argument.value
        ]
    if problems:
        raise StartError("vLLM runs something else than was configured: " + "; ".join(problems))
