"""What the configuration refuses, in words, and the schedule it describes."""

import math
from typing import Any

import attrs
import pytest

import rl_contracts
from engine_fsdp import FsdpConfig, OptimConfig
from parallel_state import ExtraParallelSizes, ParallelState


def _config(**changes: Any) -> FsdpConfig:  # noqa: ANN401
    config = FsdpConfig(model_path="model", optim=OptimConfig(learning_rate=1e-5))
    return attrs.evolve(config, **changes)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_there_is_no_training_at_temperature_zero(temperature: float) -> None:
    """Logits divided by 0 would be nan; greedy has no policy gradient (A24)."""
    with pytest.raises(ValueError, match=r"'temperature' must be > 0"):
        _config(temperature=temperature)


@pytest.mark.parametrize("temperature", [math.inf, math.nan])
def test_temperatures_that_are_no_numbers_are_refused(temperature: float) -> None:
    """Divided by infinity every logit is 0, and nothing is learnt without a word (A24)."""
    with pytest.raises(
        ValueError, match=rf"temperature: expected a finite number, got {temperature}"
    ):
        _config(temperature=temperature)


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        (ParallelState(tensor_size=2), r"parallel\.tensor_size = 2.*set tensor_size to 1"),
        (ParallelState(pipeline_size=2), r"parallel\.pipeline_size = 2"),
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


def test_sequences_may_be_shared() -> None:
    """Ulysses is an axis of this engine."""
    assert _config(parallel=ParallelState(dp_size=2, ulysses_size=2)).parallel.fsdp_size == 4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"activation_checkpointing": True}, r"activation_checkpointing.*'none', 'full', 'sel"),
        ({"offload": "optimizer"}, r"offload.*'none', 'parameters'"),
        (
            {"compile_blocks": True, "compute_dtype": "float32"},
            r"compile_blocks = True and compute_dtype: .*set compute_dtype = 'bfloat16'",
        ),
        (
            {"compile_blocks": True, "parallel": ParallelState(ulysses_size=2)},
            r"compile_blocks = True and parallel\.ulysses_size: .*set ulysses_size to 1",
        ),
        (
            {"offload_activations": True},
            r"activation_checkpointing = 'none': .* only with activation_checkpointing = 'full'; ",
        ),
        (
            {"offload_activations": True, "activation_checkpointing": "selective"},
            r"offload_activations = True and .*'selective': .*set it, or offload_activations off",
        ),
    ],
)
def test_how_it_computes_is_refused_where_it_cannot(changes: dict[str, Any], text: str) -> None:
    """A value that is none, and settings that exclude each other, with the one that would work."""
    with pytest.raises(ValueError, match=text):
        _config(**changes)


def test_unknown_dtypes_are_refused() -> None:
    """A type that no name stands for is an error at construction, with the known names."""
    with pytest.raises(ValueError, match=r"compute_dtype.*float32.*bfloat16.*float16"):
        _config(compute_dtype="float16")
    with pytest.raises(ValueError, match=r"export_dtype"):
        _config(export_dtype="fp8")


def test_weights_are_exported_as_they_are_computed_with_unless_told_otherwise() -> None:
    """The sampler gets the numbers that the engine's own passes used."""
    assert _config().resolved_export_dtype == "bfloat16"
    assert _config(compute_dtype="float32").resolved_export_dtype == "float32"
    assert _config(export_dtype="float32").resolved_export_dtype == "float32"


def test_the_optimizer_is_that_of_all_engines() -> None:
    """`engine_fsdp.OptimConfig` is the shared class, so a config fits either engine."""
    assert OptimConfig is rl_contracts.OptimConfig
