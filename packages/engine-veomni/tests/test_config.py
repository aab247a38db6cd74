"""What `VeomniConfig` refuses."""

from typing import Any, Literal

import attrs
import pytest

from engine_veomni import OptimConfig, VeomniConfig
from parallel_state import ExtraParallelSizes, ParallelState

CONFIG = VeomniConfig(model_path="model", optim=OptimConfig(learning_rate=1e-5))


@pytest.mark.parametrize("name", ["ulysses_size", "tensor_size", "pipeline_size"])
def test_other_degrees_are_refused(name: str) -> None:
    """A degree that this engine does not run is no inert setting."""
    sizes: dict[str, Any] = {name: 2}
    parallel = ParallelState(**sizes)
    with pytest.raises(ValueError, match=rf"parallel\.{name} = 2: .* set {name} to 1"):
        attrs.evolve(CONFIG, parallel=parallel)


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


def test_warmup_rises_linearly_to_the_learning_rate() -> None:
    """Four warmup steps take a quarter more each, and the fifth is the first at full rate."""
    optim = OptimConfig(learning_rate=0.4, warmup_steps=4)
    rates = [optim.learning_rate_at(steps) for steps in range(6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_beta_of_one_is_refused() -> None:
    """A mean that never decays is no mean."""
    with pytest.raises(ValueError, match=r"betas: .* below 1, got \(0\.9, 1\.0\)"):
        OptimConfig(learning_rate=0.1, betas=(0.9, 1.0))


def test_temperature_of_zero_is_refused() -> None:
    """There is no greedy training."""
    with pytest.raises(ValueError, match="'temperature' must be > 0"):
        attrs.evolve(CONFIG, temperature=0.0)
