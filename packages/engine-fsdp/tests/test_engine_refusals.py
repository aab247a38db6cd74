"""What the engine refuses, in one process, and what is left of what fails."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_cases import CPU, make_batches, make_engine, plain_loss, weights_of
from jaxtyping import Float
from torch import Tensor

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig
from parallel_state import ParallelState
from parallel_state.process_group import init_process_group
from rl_contracts.train import LossOutput, PackedBatch

SaveModel = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("process_group")


def test_a_loss_that_is_not_finite_names_its_trajectories(save_model: SaveModel) -> None:
    """The bad micro-batch is named, the gradient of the good ones is dropped, training goes on."""
    engine = make_engine(save_model())
    batches = make_batches(8)
    advantages = torch.full_like(batches[1].advantages, float("inf"))
    bad = [batches[0], replace(batches[1], advantages=advantages), batches[2]]
    before = weights_of(engine)
    name = batches[1].trajectory_ids[0]
    with pytest.raises(
        FloatingPointError, match=rf"micro-batch 1 \(trajectories {name}\): (nan|-?inf)"
    ):
        engine.forward_backward(bad, plain_loss)
    with pytest.raises(RuntimeError, match=r"no gradient at policy version 0"):
        engine.optim_step()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())
    engine.forward_backward(batches, plain_loss)
    assert engine.optim_step().policy_version == 1


def test_a_gradient_that_is_not_finite_stops_the_step(save_model: SaveModel) -> None:
    """A finite loss with a gradient of nan: no weight, moment or version changes."""

    def nan_gradient(policy_logprobs: Float[Tensor, " tokens"], _: PackedBatch) -> LossOutput:
        # at 0 the square root is finite and its slope is not
        return LossOutput(loss=(policy_logprobs * 0.0).sqrt().sum(), metrics={})

    engine = make_engine(save_model())
    before = weights_of(engine)
    assert engine.forward_backward(make_batches(), nan_gradient)["loss"] == 0.0
    with pytest.raises(FloatingPointError, match=r"norm is nan at policy version 0"):
        engine.optim_step()
    assert engine.policy_version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"positions": torch.zeros(18, dtype=torch.int64)}, r"positions that count from 0"),
        ({"loss_mask": torch.ones(18, dtype=torch.bool)}, r"first token of a sequence"),
        ({"token_ids": torch.full((18,), 37)}, r"token ids from 0 to 36, got 37 to 37"),
        (
            {"cu_seqlens": torch.tensor([0, 7, 14, 17], dtype=torch.int32)},
            r"rise from 0 to its 18 tokens, got \[0, 7, 14, 17\]",
        ),
    ],
)
def test_malformed_batches_are_named(
    save_model: SaveModel, change: dict[str, Tensor], text: str
) -> None:
    """What would train on garbage is refused with the micro-batch and its trajectories."""
    engine = make_engine(save_model())
    bad = [replace(batch, **change) for batch in make_batches()]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"micro-batch 0 \(trajectories a, bb, ccc\).*{text}"):
        engine.forward_backward(bad, plain_loss)
    with pytest.raises(ValueError, match=text):
        engine.logprobs(bad)


def test_no_micro_batches_are_refused(save_model: SaveModel) -> None:
    """An empty list would return a loss of nothing."""
    with pytest.raises(ValueError, match=r"at least one, got 0"):
        make_engine(save_model()).forward_backward(list[PackedBatch](), plain_loss)


def test_a_detached_loss_is_refused(save_model: SaveModel) -> None:
    """A loss without gradient on tokens to learn from would train nothing without a word."""

    def detached(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
        return plain_loss(policy_logprobs.detach(), batch)

    with pytest.raises(
        ValueError, match=r"loss of micro-batch 0 \(trajectories a, bb, ccc\) carries no grad"
    ):
        make_engine(save_model()).forward_backward(make_batches(), detached)


def test_a_loss_function_that_raises_leaves_nothing_behind(save_model: SaveModel) -> None:
    """Its exception comes through; the part of the gradient before it is gone, and the next call
    gives what a fresh engine gives.
    """
    folder = save_model()
    batches = make_batches(8)

    def raising(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
        if batch is batches[1] or batch.trajectory_ids == batches[1].trajectory_ids:
            raise KeyError("reward")
        return plain_loss(policy_logprobs, batch)

    norms = []
    for fails_first in (True, False):
        engine = make_engine(folder)
        if fails_first:
            with pytest.raises(KeyError, match="reward"):
                engine.forward_backward(batches, raising)
            with pytest.raises(RuntimeError, match=r"no gradient"):
                engine.optim_step()
        engine.forward_backward(batches, plain_loss)
        norms.append(engine.optim_step().grad_norm)
    assert norms[0] == norms[1]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"compile_blocks": True, "compute_dtype": "bfloat16"}, r"set compile_blocks = False"),
        ({"offload": "parameters"}, r"in host memory already: set offload = 'none'"),
        (
            {"offload_activations": True, "activation_checkpointing": "full"},
            r"in host memory already: set offload_activations = False",
        ),
    ],
)
def test_settings_without_effect_on_a_cpu_are_refused(
    save_model: SaveModel, changes: dict[str, object], text: str
) -> None:
    """Compiled blocks and offloading are for GPUs; on a CPU they say so."""
    with pytest.raises(ValueError, match=rf"has no effect on a CPU device.*{text}"):
        make_engine(save_model(), **changes)


def test_what_runs_is_compared_with_what_was_asked(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention that does not run, for one, is found at construction, both sides named."""
    monkeypatch.setattr("engine_fsdp.model.ATTENTION_NAME", "sdpa")
    with pytest.raises(
        RuntimeError, match=r"calls of packed attention: asked for 2, what runs has 0"
    ):
        make_engine(save_model())


def test_a_world_that_does_not_fit_is_refused(save_model: SaveModel) -> None:
    """Two ranks configured, one running: the message has both numbers."""
    with pytest.raises(ValueError, match=r"needs 2 ranks .* got a world of 1"):
        make_engine(save_model(), parallel=ParallelState(dp_size=2))


def test_devices_and_groups_that_are_not_there_are_refused(save_model: SaveModel) -> None:
    """A device that is not there, one without packed attention, and no process group, in words."""
    config = FsdpConfig(model_path=str(save_model()), optim=OptimConfig(learning_rate=0.01))
    beyond = torch.device("cuda", torch.cuda.device_count())
    with pytest.raises(ValueError, match=rf"got {beyond}, but torch .* sees \d+ such devices"):
        FsdpEngine(config, device=beyond)
    with pytest.raises(ValueError, match=r"expected a CPU or a CUDA .* device, got meta"):
        FsdpEngine(config, device=torch.device("meta"))
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"process_group\.init_process_group\(\) first"):
        FsdpEngine(config, device=CPU)
    init_process_group()  # for the fixture to end
