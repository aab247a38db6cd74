"""The optimizer's settings."""

from typing import Any

import attrs
import pytest

from rl_contracts import ConfigError, OptimConfig, load_config


def test_warmup_by_hand() -> None:
    """Four warmup steps to 0.1 take 0.025, 0.05, 0.075 and 0.1, then it stays."""
    optim = OptimConfig(learning_rate=0.1, warmup_steps=4)
    rates = [optim.learning_rate_at(steps) for steps in range(6)]
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert OptimConfig(learning_rate=0.1).learning_rate_at(0) == 0.1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"learning_rate": 0.0}, r"'learning_rate' must be > 0"),
        ({"betas": (0.9, 1.0)}, r"betas: expected two numbers.*below 1, got \(0\.9, 1\.0\)"),
        ({"eps": 0.0}, r"'eps' must be > 0"),
        ({"weight_decay": -0.1}, r"'weight_decay' must be >= 0"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm: expected a number above 0, or None.*got 0\.0"),
        ({"warmup_steps": -1}, r"'warmup_steps' must be >= 0"),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], text: str) -> None:
    """Each bound is checked at construction."""
    with pytest.raises(ValueError, match=text):
        attrs.evolve(OptimConfig(learning_rate=0.1), **changes)


def test_it_is_read_from_overrides() -> None:
    """Betas come from a list, no clipping from none, and a wrong value is named with its path."""
    loaded = load_config(OptimConfig, overrides=["learning_rate=1e-6", "betas=[0.9, 0.95]"])
    assert loaded.value == OptimConfig(learning_rate=1e-6, betas=(0.9, 0.95))
    with pytest.raises(ConfigError, match=r"betas: expected two numbers.*got \(0\.9, 1\.5\)"):
        load_config(OptimConfig, overrides=["learning_rate=1e-6", "betas=[0.9, 1.5]"])
