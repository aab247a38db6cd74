"""The optimizer against torch's own on plain tensors, and schedules against transformers'."""

import pytest
import torch
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from engine_fsdp import FsdpConfig, MuonConfig, OptimConfig
from engine_fsdp.optimizer import PolicyOptimizer
from rl_contracts.optim import Schedule

OPTIM = OptimConfig(learning_rate=0.02, weight_decay=0.1, warmup_steps=2)


def _parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding": (7, 4), "matrix": (4, 6), "norm": (4,)}
    return {
        name: torch.randn(shape, generator=generator).requires_grad_()
        for name, shape in shapes.items()
    }


def _descend(parameters: dict[str, Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_muon_moves_the_matrices_and_adamw_the_rest() -> None:
    """Two steps of a warmup equal torch's two optimizers, side by side, bit for bit."""
    ours, theirs = _parameters(), _parameters()
    optimizer = PolicyOptimizer(
        ours, OPTIM, muon=MuonConfig(momentum=0.9), matrices=frozenset({"matrix"})
    )
    muon = torch.optim.Muon(
        [theirs["matrix"]],
        lr=0.0,
        weight_decay=0.1,
        momentum=0.9,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [theirs["embedding"], theirs["norm"]], lr=0.0, weight_decay=0.1, fused=True
    )
    for step, rate in enumerate((0.01, 0.02)):
        for parameters in (ours, theirs):
            _descend(parameters, step)
        optimizer.step(steps_done=step)
        for each in (muon, adamw):
            each.param_groups[0]["lr"] = rate
            each.step()  # type: ignore[no-untyped-call]
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name
    assert optimizer.state().keys() == {
        "optim.momentum_buffer.matrix",
        *(f"optim.{part}.{name}" for name in ("embedding", "norm") for part in ADAMW_STATE),
    }


ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")


def test_state_that_is_asked_for_early_is_what_the_optimizer_starts_from() -> None:
    """A step after a look at the state is the step without the look, for both optimizers."""
    looked, not_looked = _parameters(), _parameters()
    for parameters, looks in ((looked, True), (not_looked, False)):
        optimizer = PolicyOptimizer(
            parameters, OPTIM, muon=MuonConfig(), matrices=frozenset({"matrix"})
        )
        if looks:
            assert not any(tensor.any() for tensor in optimizer.state().values())
        _descend(parameters, 0)
        optimizer.step(steps_done=0)
    assert all(torch.equal(looked[name], not_looked[name]) for name in looked)


def test_muon_does_not_go_together_with_offload() -> None:
    """Its products of whole matrices would run on the host."""
    with pytest.raises(ValueError, match=r"muon and offload = 'parameters': .* set offload to"):
        FsdpConfig(model_path="model", optim=OPTIM, muon=MuonConfig(), offload="parameters")


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_is_the_one_of_transformers(schedule: Schedule) -> None:
    """From the end of the warmup, which begins at 0 there, the rates are equal to the last step."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    make = (
        get_cosine_schedule_with_warmup if schedule == "cosine" else get_linear_schedule_with_warmup
    )
    theirs = make(optimizer, num_warmup_steps=3, num_training_steps=10)
    ours = OptimConfig(learning_rate=0.3, warmup_steps=3, schedule=schedule, total_steps=10)
    for steps in range(11):
        if steps >= 3:
            rate = ours.learning_rate_at(steps)
            assert theirs.get_last_lr()[0] == pytest.approx(rate, abs=1e-12)
        optimizer.step()
        theirs.step()
