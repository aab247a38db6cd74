"""Losses and gradients that are not finite: stop or skip, and say where."""

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig
from rl_contracts.packing import pack
from rl_contracts.rollout import PolicyVersion, Trajectory
from rl_contracts.train import LossOutput, PackedBatch

SaveModel = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("process_group")


def _engine(folder: Path, **changes: object) -> FsdpEngine:
    settings: dict[str, object] = {
        "model_path": str(folder),
        "optim": OptimConfig(learning_rate=0.01),
        "compute_dtype": "float32",
        **changes,
    }
    return FsdpEngine(FsdpConfig(**settings), device=torch.device("cpu"))  # type: ignore[arg-type]


def _batches() -> list[PackedBatch]:
    rows = [
        Trajectory(
            trajectory_id=name,
            group_id="group",
            token_ids=(3, 5, 7, 11, index),
            loss_mask=(False, True, True, True, True),
            rollout_logprobs=(0.0,) * 5,
            oldest_version=PolicyVersion(0),
            newest_version=PolicyVersion(0),
        )
        for index, name in enumerate(("a", "b"))
    ]
    return pack(rows, [1.0, 1.0], max_tokens=5)[0]


def _loss(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
    rows = torch.tensor(len(batch.trajectory_ids) / 2)
    return LossOutput(loss=-policy_logprobs.sum() / 8, metrics={"rows": rows})


def _spoiled(
    spoil: Callable[[Tensor], Tensor],
) -> Callable[[Float[Tensor, " tokens"], PackedBatch], LossOutput]:
    """The loss, spoiled for row b."""

    def loss_fn(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
        output = _loss(policy_logprobs, batch)
        if batch.trajectory_ids == ("b",):
            return LossOutput(loss=spoil(output.loss), metrics=output.metrics)
        return output

    return loss_fn


def _root_of_zero(loss: Tensor) -> Tensor:
    """A finite loss whose gradient is 0 / 0."""
    return (0.0 * loss).sqrt()


def test_a_gradient_that_is_not_finite_names_the_sequences(save_model: SaveModel) -> None:
    """The loss is finite, its gradient is not: row b has it, row a does not."""
    engine = _engine(save_model())
    before = engine._state.tensors(engine.policy_version)
    copies = {name: tensor.clone() for name, tensor in before.items()}
    engine.forward_backward(_batches(), _spoiled(_root_of_zero))
    with pytest.raises(
        FloatingPointError,
        match=r"norm is nan at policy version 0: the loss's own gradient is not finite in rank 0: "
        r"micro-batch 1 \(trajectories b\); the gradient was dropped and no weight changed",
    ):
        engine.optim_step()
    assert all(
        torch.equal(tensor, engine._state.tensors(engine.policy_version)[name])
        for name, tensor in copies.items()
    )


def test_a_backward_pass_that_overflows_says_so(save_model: SaveModel) -> None:
    """Every loss has a finite gradient, and the norm of the weights' gradient is infinite."""
    engine = _engine(save_model())
    engine.forward_backward(_batches(), _spoiled(lambda loss: loss * 1e36))
    with pytest.raises(FloatingPointError, match=r"the model's backward pass overflows"):
        engine.optim_step()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda loss: loss * math.nan, r"loss is not finite .* micro-batch 1 \(trajectories b\)"),
        (_root_of_zero, r"own gradient is not finite in rank 0: micro-batch 1 \(trajectories b\)"),
    ],
)
def test_a_skipped_step_counts_and_changes_nothing(
    save_model: SaveModel,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Tensor], Tensor],
    text: str,
) -> None:
    """Weights and moments stay, the version rises, the text is logged; what is added to a spoiled
    gradient goes with it; and the next step is that of an engine that met no such loss.
    """
    engine = _engine(save_model(), on_non_finite="skip")
    before = {
        name: tensor.clone()
        for name, tensor in engine._state.tensors(engine.policy_version).items()
    }
    metrics = engine.forward_backward(_batches(), _spoiled(spoil))
    assert metrics["rows"] == 1.0
    engine.forward_backward(_batches(), _loss)
    with caplog.at_level(logging.WARNING, logger="engine_fsdp.engine"):
        result = engine.optim_step()
    assert result.policy_version == engine.policy_version == 1
    assert math.isnan(result.grad_norm)
    (message,) = caplog.messages
    assert re.search(text, message)
    after = engine._state.tensors(engine.policy_version)
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert changed == ["policy_version"]
    untouched = _engine(save_model())
    for trained in (engine, untouched):
        trained.forward_backward(_batches(), _loss)
        trained.optim_step()
    weights, others = (dict(each.export_weights()) for each in (engine, untouched))
    assert all(torch.equal(weights[name], others[name]) for name in others)


def test_past_the_end_of_a_schedule_no_step_is_taken(save_model: SaveModel) -> None:
    """A cosine to 0 over two steps: the third would change nothing, and says so (verl#6683)."""
    optim = OptimConfig(learning_rate=0.01, schedule="cosine", total_steps=2)
    engine = _engine(save_model(), optim=optim)
    for rate in (0.01, 0.005):
        assert engine.learning_rate == pytest.approx(rate)
        engine.forward_backward(_batches(), _loss)
        engine.optim_step()
    engine.forward_backward(_batches(), _loss)
    with pytest.raises(ValueError, match=r"rate is 0 after 2 steps.*cosine .*raise total_steps"):
        engine.optim_step()
    assert engine.policy_version == 2
