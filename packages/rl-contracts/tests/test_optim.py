"""The optimizer's settings."""

import math
from pathlib import Path
from typing import Any

import attrs
import pytest

from rl_contracts import ConfigError, OptimConfig, load_config
from rl_contracts.optim import Schedule


def test_warmup_by_hand() -> None:
    """Four warmup steps to 0.1 take 0.025, 0.05, 0.075 and 0.1, then it stays."""
    optim = OptimConfig(learning_rate=0.1, warmup_steps=4)
    rates = [optim.learning_rate_at(steps) for steps in range(6)]
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert OptimConfig(learning_rate=0.1).learning_rate_at(0) == 0.1


@pytest.mark.parametrize(
    ("schedule", "falling"),
    [
        ("linear", [0.1, 0.08, 0.06, 0.04]),
        # 0.02 + 0.08 * (1 + cos(pi p)) / 2, where cos(pi / 4) is the root of a half
        ("cosine", [0.1, 0.0882842712, 0.06, 0.0317157288]),
    ],
)
def test_schedules_by_hand(schedule: Schedule, falling: list[float]) -> None:
    """Two steps up, four down to 0.02, where it stays; without a final rate it falls to 0."""
    optim = OptimConfig(
        learning_rate=0.1,
        warmup_steps=2,
        schedule=schedule,
        total_steps=6,
        final_learning_rate=0.02,
    )
    rates = [optim.learning_rate_at(steps) for steps in range(8)]
    assert rates == pytest.approx([0.05, 0.1, *falling, 0.02, 0.02])
    to_zero = attrs.evolve(optim, final_learning_rate=None)
    assert to_zero.learning_rate_at(5) == pytest.approx((falling[3] - 0.02) / 0.8)
    assert to_zero.learning_rate_at(6) == to_zero.learning_rate_at(99) == 0.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"schedule": "cosine"}, r"schedule = cosine: expected total_steps, .* got None"),
        ({"total_steps": 9}, r"total_steps = 9: a constant schedule has no end; leave it out"),
        (
            {"final_learning_rate": 0.0},
            r"final_learning_rate = 0\.0: a constant schedule has no end",
        ),
        ({"schedule": "linear", "total_steps": -1}, r"'total_steps' must be >= 1"),
        (
            {"schedule": "linear", "total_steps": 5, "warmup_steps": 5},
            r"total_steps = 5: expected more than warmup_steps = 5",
        ),
        (
            {"schedule": "linear", "total_steps": 5, "final_learning_rate": 0.2},
            r"final_learning_rate = 0\.2: expected at most learning_rate = 0\.1",
        ),
        ({"schedule": "wsd"}, r"'schedule' must be in \('constant', 'linear', 'cosine'\)"),
    ],
)
def test_a_schedule_without_its_end_is_refused(changes: dict[str, Any], text: str) -> None:
    """So is an end without a schedule that has one: neither could take effect (verl#6683)."""
    with pytest.raises(ValueError, match=text):
        attrs.evolve(OptimConfig(learning_rate=0.1), **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"learning_rate": 0.0}, r"'learning_rate' must be > 0"),
        ({"betas": (0.9, 1.0)}, r"betas: expected two numbers.*below 1, got \(0\.9, 1\.0\)"),
        ({"eps": 0.0}, r"'eps' must be > 0"),
        ({"weight_decay": -0.1}, r"'weight_decay' must be >= 0"),
        (
            {"max_grad_norm": 0.0},
            r"max_grad_norm: expected a finite number above 0, or None.*got 0\.0",
        ),
        ({"warmup_steps": -1}, r"'warmup_steps' must be >= 0"),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], text: str) -> None:
    """Each bound is checked at construction."""
    with pytest.raises(ValueError, match=text):
        attrs.evolve(OptimConfig(learning_rate=0.1), **changes)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "name",
    [
        *("learning_rate", "eps", "weight_decay", "max_grad_norm", "final_learning_rate"),
        *("betas.0", "betas.1"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(name: str, value: float) -> None:
    """Infinity and nan would pass a bound, and turn steps, decay or clipping off (A24)."""
    field, _, place = name.partition(".")
    setting = (value, 0.5) if place == "0" else (0.5, value) if place else value
    text = "two numbers of at least 0 and below 1" if place else "a finite number"
    changes: dict[str, Any] = {field: setting}
    with pytest.raises(ValueError, match=rf"^{field}: expected {text}.*, got .*{value}"):
        attrs.evolve(OptimConfig(learning_rate=0.1), **changes)


def test_every_float_is_among_them() -> None:
    """A float that is added to the settings belongs into the test above."""
    floats = {field.name for field in attrs.fields(OptimConfig) if "float" in str(field.type)}
    assert floats == {
        *("learning_rate", "eps", "weight_decay", "max_grad_norm", "betas"),
        "final_learning_rate",
    }


def test_infinity_in_a_file_is_named(tmp_path: Path) -> None:
    """TOML can write it; the error leads to the setting and the file."""
    file = tmp_path / "optim.toml"
    file.write_text("learning_rate = inf\n")
    with pytest.raises(
        ConfigError, match=r"learning_rate: expected a finite number, got inf  \[file .*optim\.toml"
    ):
        load_config(OptimConfig, file=file)


def test_an_integer_above_all_floats_is_named() -> None:
    """It is a problem of the setting, like infinity, and no OverflowError."""
    with pytest.raises(ConfigError, match=r"learning_rate: expected float, got 1000*0 \(int\), ab"):
        load_config(OptimConfig, overrides=[f"learning_rate=1{'0' * 400}"])


def test_it_is_read_from_overrides() -> None:
    """Betas come from a list, no clipping from none, and a wrong value is named with its path."""
    loaded = load_config(OptimConfig, overrides=["learning_rate=1e-6", "betas=[0.9, 0.95]"])
    assert loaded.value == OptimConfig(learning_rate=1e-6, betas=(0.9, 0.95))
    with pytest.raises(ConfigError, match=r"betas: expected two numbers.*got \(0\.9, 1\.5\)"):
        load_config(OptimConfig, overrides=["learning_rate=1e-6", "betas=[0.9, 1.5]"])
