"""Soft gates."""

import pytest
import torch
from torch import Tensor

from algos_gspo_dapo_grpo import SapoLoss, Surrogate, sapo_token_losses

MASK = torch.tensor([True, True, True, False])
ADVANTAGES = torch.tensor([1.0, 1.0, -2.0, 5.0])


def _logs(*ratios: float) -> Tensor:
    return torch.log(torch.tensor(ratios)).requires_grad_()


def _gradient(surrogate: Surrogate, policy: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(surrogate.losses[MASK].sum(), policy)
    values: list[float] = gradient.tolist()
    return values


def test_the_gate_by_hand() -> None:
    """At ratio 1: 2 A and 2 A / 1.05; at ratio 2 with A = 1: 4 * sigmoid(1)."""
    surrogate = sapo_token_losses(
        _logs(1.0, 2.0, 1.0, 1.0), torch.zeros(4), ADVANTAGES, MASK, config=SapoLoss()
    )
    expected = [-2.0, -4.0 / (1.0 + 2.718281828**-1), 4.0 / 1.05]
    assert surrogate.losses[:3].tolist() == pytest.approx(expected)
    assert not surrogate.clipped.any()


def test_at_ratio_one_the_gradient_is_reinforce() -> None:
    """The slope of the gate is 1 there, whatever the temperature."""
    policy = _logs(1.0, 1.0, 1.0, 1.0)
    config = SapoLoss(temperature_positive=3.0, temperature_negative=0.5)
    surrogate = sapo_token_losses(policy, torch.zeros(4), ADVANTAGES, MASK, config=config)
    assert _gradient(surrogate, policy) == pytest.approx([-1.0, -1.0, 2.0, 0.0])


def test_the_gradient_fades_to_both_sides_and_faster_for_bad_samples() -> None:
    """At ratios 3 and 1/3 less than at 1; at the same ratio less for A < 0 than for A > 0."""
    policy = _logs(3.0, 1 / 3, 3.0, 1.0)
    surrogate = sapo_token_losses(policy, torch.zeros(4), ADVANTAGES, MASK, config=SapoLoss())
    up, down, bad, _ = _gradient(surrogate, policy)
    assert -3.0 < up < 0.0
    assert -1.0 < down < 0.0
    assert abs(bad) / 2.0 < abs(up)


def test_a_temperature_of_zero_is_refused() -> None:
    """The gate divides by it."""
    with pytest.raises(ValueError, match=r"SapoLoss: expected temperature_negative above 0"):
        SapoLoss(temperature_negative=0.0)
