"""What the configuration refuses, in words, and the schedule it describes."""

from typing import Any

import attrs
import pytest

from engine_fsdp import FsdpConfig, OptimConfig
from parallel_state import ExtraParallelSizes, ParallelState


def _config(**changes: Any) -> FsdpConfig:  # noqa: ANN401
    config = FsdpConfig(model_path="model", optim=OptimConfig(learning_rate=1e-5))
    return attrs.evolve(config, **changes)


def test_warmup_by_hand() -> None:
    """Four warmup steps to 0.1 take 0.025, 0.05, 0.075 and 0.1, then it stays."""
    optim = OptimConfig(learning_rate=0.1, warmup_steps=4)
    rates = [optim.learning_rate_at(steps) for steps in range(6)]
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert OptimConfig(learning_rate=0.1).learning_rate_at(0) == 0.1


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_there_is_no_training_at_temperature_zero(temperature: float) -> None:
    """Logits divided by 0 would be nan; greedy has no policy gradient (A24)."""
    with pytest.raises(ValueError, match=r"'temperature' must be > 0"):
        _config(temperature=temperature)


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        (ParallelState(tensor_size=2), r"parallel\.tensor_size = 2.*set tensor_size to 1"),
        (ParallelState(pipeline_size=2), r"parallel\.pipeline_size = 2"),
        (ParallelState(ulysses_size=2), r"parallel\.ulysses_size = 2"),
        (
            ParallelState(dp_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=2)),
            r"parallel\.extra_parallel_sizes\['ep'\] = 2",
        ),
    ],
)
def test_axes_without_effect_are_refused(parallel: ParallelState, text: str) -> None:
    """An axis that this engine does not split along is an error that names it."""
    with pytest.raises(ValueError, match=text):
        _config(parallel=parallel)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"learning_rate": 0.0}, r"'learning_rate' must be > 0"),
        ({"betas": (0.9, 1.0)}, r"betas: expected two numbers.*got \(0\.9, 1\.0\)"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm: expected a number above 0, or None.*got 0\.0"),
        ({"warmup_steps": -1}, r"'warmup_steps' must be >= 0"),
    ],
)
def test_optimizer_settings_out_of_range(changes: dict[str, Any], text: str) -> None:
    """Each bound is checked at construction."""
    with pytest.raises(ValueError, match=text):
        attrs.evolve(OptimConfig(learning_rate=0.1), **changes)


def test_unknown_dtypes_are_refused() -> None:
    """A type that no name stands for is an error at construction, with the known names."""
    with pytest.raises(ValueError, match=r"compute_dtype.*float32.*bfloat16.*float16"):
        _config(compute_dtype="float16")
    with pytest.raises(ValueError, match=r"export_dtype"):
        _config(export_dtype="fp8")
