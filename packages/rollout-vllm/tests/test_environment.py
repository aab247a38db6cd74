"""Environment variables: what the engine gets, and which contradictions are refused."""

import os

import pytest

from rollout_vllm import StartError, VllmConfig, engine_environment
from rollout_vllm.arguments import EffectiveArgument
from rollout_vllm.environment import (
    applied_environment,
    check_engine_environment,
    check_environment,
)
from rollout_vllm.readback import check_settings

CONFIG = VllmConfig(model="m", max_model_len=64, kv_cache_gib=2.0, cpu_threads=3)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (
            {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            r"VLLM_ENABLE_V1_MULTIPROCESSING is '1', this config needs it to be '0'",
        ),
        (
            {"VLLM_CPU_KVCACHE_SPACE": "4"},
            r"VLLM_CPU_KVCACHE_SPACE is '4', this config needs it unset: it would override",
        ),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-1"}, r"VllmConfig.cpu_threads sets how many threads"),
    ],
)
def test_contradictions_are_refused(environment: dict[str, str], text: str) -> None:
    """The variable, both values and the reason stand in the message."""
    with pytest.raises(ValueError, match=text):
        check_environment(CONFIG, environment)


def test_values_that_agree_pass() -> None:
    """The same cache size, no binding of threads, and the same switch are no contradiction."""
    check_environment(
        CONFIG,
        {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
    )


def test_environment_is_applied_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own values hold inside only, and the user's defaults are kept."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    with applied_environment(CONFIG):
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert os.environ["OMP_WAIT_POLICY"] == "active"
        assert os.environ["GOMP_SPINCOUNT"] == "0"
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert "GOMP_SPINCOUNT" not in os.environ


def test_threads_stay_the_environments_if_not_configured() -> None:
    """Without `cpu_threads` the number of threads is not touched."""
    free = VllmConfig(model="m", max_model_len=64, kv_cache_gib=2.0)
    assert "OMP_NUM_THREADS" not in engine_environment(free)


def test_engine_with_another_environment_is_refused() -> None:
    """What the engine's process found is compared with what it was to find."""
    with pytest.raises(StartError, match=r"found OMP_NUM_THREADS = None, expected '3'"):
        check_engine_environment(CONFIG, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})


def test_engine_with_other_settings_is_refused() -> None:
    """A setting that vLLM rewrote is named with its origin and both values."""
    asked = {
        "async_scheduling": EffectiveArgument(value=True, origin="VllmConfig.engine_args"),
        "seed": EffectiveArgument(value=0, origin="VllmConfig.seed"),
    }
    reported: dict[str, dict[str, object]] = {
        "scheduler": {"async_scheduling": False},
        "model": {"seed": 0},
    }
    with pytest.raises(
        StartError,
        match=r"configured: async_scheduling = True \(VllmConfig.engine_args\), .* reports False$",
    ):
        check_settings(asked, reported)


@pytest.mark.parametrize(
    ("name", "value"), [("max_lora_rank", 8), ("compilation_config", {"level": 0})]
)
def test_setting_that_the_engine_does_not_report_is_refused(name: str, value: object) -> None:
    """What is absent from the report, or no plain value, does not pass for verified."""
    asked = {
        name: EffectiveArgument(value=value, origin="VllmConfig.engine_args"),
        "seed": EffectiveArgument(value=0, origin="VllmConfig.seed"),
    }
    with pytest.raises(
        StartError, match=rf"configured: {name} = .* \(VllmConfig.engine_args\) cannot be verified"
    ):
        check_settings(asked, {"model": {"seed": 0}})


def test_setting_of_the_callers_process_need_not_be_reported() -> None:
    """The exceptions are by name: the engine's process never holds them."""
    asked = {"disable_log_stats": EffectiveArgument(value=True, origin="fixed")}
    check_settings(asked, {"model": {}})
