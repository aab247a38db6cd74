"""The environment variables with which the engine process starts."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import attrs

from rollout_vllm.config import VllmConfig
from rollout_vllm.errors import StartError

Rule = Literal["required", "engine", "default"]
"""What another value in the process environment means: an error (`required`), nothing, since the
engine gets its own (`engine`), or that it is kept (`default`)."""


@attrs.frozen(kw_only=True)
class EnvironmentSetting:
    """What one variable is while the engine starts."""

    value: str | None
    """The value; None: not set."""

    reason: str
    """Why."""

    rule: Rule
    """What happens if the process environment holds another value."""

    accepted: tuple[str, ...] = ()
    """Further values that come to the same."""


def engine_environment(config: VllmConfig) -> dict[str, EnvironmentSetting]:
    """The variables that vLLM reads and that this config decides."""
    settings = {
        "VLLM_NO_USAGE_STATS": EnvironmentSetting(
            value="1", rule="default", reason="nothing is reported to anybody"
        ),
        **(_cpu_environment(config) if config.device == "cpu" else {}),
    }
    if config.cpu_threads is not None:
        settings["OMP_NUM_THREADS"] = EnvironmentSetting(
            value=str(config.cpu_threads), rule="engine", reason="VllmConfig.cpu_threads"
        )
    return settings


def _cpu_environment(config: VllmConfig) -> dict[str, EnvironmentSetting]:
    """What vLLM's CPU engine reads beside."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": EnvironmentSetting(
            value="0",
            rule="required",
            reason="the engine's process holds the worker itself; with 1, vLLM on the CPU starts "
            "another process for it (vllm/platforms/cpu.py)",
        ),
        "VLLM_CPU_KVCACHE_SPACE": EnvironmentSetting(
            value=None,
            rule="required",
            accepted=("",) if config.kv_cache_gib is None else ("", f"{config.kv_cache_gib:g}"),
            reason="it would override VllmConfig.kv_cache_gib and gpu_memory_utilization",
        ),
        "VLLM_CPU_OMP_THREADS_BIND": EnvironmentSetting(
            value=None,
            rule="required",
            accepted=("nobind",),
            reason="vLLM binds threads only of workers in a process of their own; "
            "VllmConfig.cpu_threads sets how many threads there are",
        )
        if config.pipeline_parallel_size == 1
        else EnvironmentSetting(
            value="nobind",
            rule="required",
            reason="vLLM would give each stage cores of its own, of which there may be too few, "
            "and others may work there; VllmConfig.cpu_threads sets how many threads each has",
        ),
        # threads that spin while they wait starve whoever shares the cores
        "OMP_WAIT_POLICY": EnvironmentSetting(
            value="passive", rule="default", reason="waiting threads leave the cores to others"
        ),
        "GOMP_SPINCOUNT": EnvironmentSetting(
            value="0", rule="default", reason="waiting threads leave the cores to others"
        ),
    }


def check_environment(config: VllmConfig, environment: Mapping[str, str]) -> None:
    """Refuse variables that contradict the config.

    Raises:
        ValueError: names the variable, both values and the reason.
    """
    for name, setting in engine_environment(config).items():
        found = environment.get(name)
        if setting.rule != "required" or found in (None, setting.value, *setting.accepted):
            continue
        expected = "unset" if setting.value is None else f"to be {setting.value!r}"
        message = (
            f"environment: {name} is {found!r}, this config needs it {expected}: {setting.reason}"
        )
        raise ValueError(message)


@contextmanager
def applied_environment(config: VllmConfig) -> Iterator[None]:
    """Set the variables while the engine starts, which inherits them, and take them back.

    Raises:
        ValueError: as `check_environment`.
    """
    check_environment(config, os.environ)
    settings = engine_environment(config)
    before = {name: os.environ.get(name) for name in settings}
    try:
        for name, setting in settings.items():
            if setting.value is None or (setting.rule == "default" and name in os.environ):
                continue
            os.environ[name] = setting.value
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def check_engine_environment(config: VllmConfig, seen: Mapping[str, str]) -> None:
    """Compare what the engine's process found with what it was to find.

    Raises:
        StartError: names the variable and both values.
    """
    for name, setting in engine_environment(config).items():
        if setting.rule == "default" or setting.value is None:
            continue
        if seen.get(name) != setting.value:
            message = (
                f"the engine's process found {name} = {seen.get(name)!r}, expected "
                f"{setting.value!r}: {setting.reason}"
            )
            raise StartError(message)
