"""What `VeomniConfig` refuses."""

import math
from typing import Any, Literal

import attrs
import pytest

from engine_veomni import OptimConfig, VeomniConfig
from parallel_state import ExtraParallelSizes, ParallelState

CONFIG = VeomniConfig(model_path="model", optim=OptimConfig(learning_rate=1e-5))


@pytest.mark.parametrize("name", ["tensor_size", "pipeline_size"])
def test_other_degrees_are_refused(name: str) -> None:
    """A degree that this engine does not run is no inert setting."""
    sizes: dict[str, Any] = {name: 2}
    parallel = ParallelState(**sizes)
    with pytest.raises(ValueError, match=rf"parallel\.{name} = 2: .* set {name} to 1"):
        attrs.evolve(CONFIG, parallel=parallel)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("router_replay", "logprobs"),
        ("router_replay", "rollout"),
        ("router_statistics", True),
        ("router_aux_loss_coef", 0.1),
    ],
)
def test_slices_have_no_routes_of_their_own(name: str, value: object) -> None:
    """What is kept of a micro-batch's routes has no place for ranks that hold a slice of it."""
    changes: dict[str, Any] = {name: value, "parallel": ParallelState(ulysses_size=2)}
    with pytest.raises(
        ValueError, match=rf"{name} with parallel\.ulysses_size = 2: .* leave {name}"
    ):
        attrs.evolve(CONFIG, **changes)


def test_other_axes_are_refused() -> None:
    """Only experts are split: another axis would do nothing."""
    sizes: ExtraParallelSizes[Literal["ep", "emb"]] = ExtraParallelSizes({"ep": 1, "emb": 1})
    parallel = ParallelState(extra_parallel_sizes=sizes)
    with pytest.raises(ValueError, match=r"expected 'ep' alone, got \['emb', 'ep'\]"):
        VeomniConfig(model_path="model", optim=CONFIG.optim, parallel=parallel)  # type: ignore[arg-type]


def test_weights_are_exported_as_they_are_computed_with_unless_told_otherwise() -> None:
    """The sampler gets the numbers that the engine's own passes used."""
    assert CONFIG.resolved_export_dtype == "bfloat16"
    assert attrs.evolve(CONFIG, compute_dtype="float32").resolved_export_dtype == "float32"
    assert attrs.evolve(CONFIG, export_dtype="float32").resolved_export_dtype == "float32"


@pytest.mark.parametrize("name", ["compute_dtype", "export_dtype"])
def test_unknown_dtypes_are_refused(name: str) -> None:
    """A type that no name stands for is an error at construction, not a float16 that runs."""
    changes: dict[str, Any] = {name: "float16"}
    with pytest.raises(ValueError, match=rf"{name}: expected float32 or bfloat16, got 'float16'"):
        attrs.evolve(CONFIG, **changes)


def test_temperature_of_zero_is_refused() -> None:
    """There is no greedy training."""
    with pytest.raises(ValueError, match="'temperature' must be > 0"):
        attrs.evolve(CONFIG, temperature=0.0)


@pytest.mark.parametrize("temperature", [math.inf, math.nan])
def test_temperatures_that_are_no_numbers_are_refused(temperature: float) -> None:
    """Divided by infinity every logit is 0, and nothing is learnt without a word (A24)."""
    with pytest.raises(
        ValueError, match=rf"temperature: expected a finite number, got {temperature}"
    ):
        attrs.evolve(CONFIG, temperature=temperature)


@pytest.mark.parametrize(
    ("name", "value"),
    [("router_replay", "sampler"), ("offload", "optimizer"), ("router_aux_loss_coef", -0.1)],
)
def test_values_that_mean_nothing_here_are_refused(name: str, value: object) -> None:
    """With the setting's name; VeOmni has no offload of the optimizer alone."""
    changes: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=rf"'{name}' must be "):
        attrs.evolve(CONFIG, **changes)
