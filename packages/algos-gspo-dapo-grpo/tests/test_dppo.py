"""Trust regions in probability."""

import math

import pytest
import torch
from torch import Tensor

from algos_gspo_dapo_grpo import (
    CispoLoss,
    DppoKlLoss,
    DppoTvLoss,
    Surrogate,
    cispo_token_losses,
    dppo_token_losses,
)

MASK = torch.ones(4, dtype=torch.bool)
# Probabilities: 0.5 to 0.8 with A > 0 and < 0, 0.8 to 0.5 with A > 0 and < 0.
OLD = torch.log(torch.tensor([0.5, 0.5, 0.8, 0.8]))
NEW = torch.log(torch.tensor([0.8, 0.8, 0.5, 0.5]))
ADVANTAGES = torch.tensor([1.0, -1.0, 1.0, -1.0])


def _run(config: DppoTvLoss | DppoKlLoss) -> tuple[Surrogate, Tensor]:
    policy = NEW.clone().requires_grad_()
    surrogate = dppo_token_losses(policy, OLD, ADVANTAGES, MASK, config=config)
    (gradient,) = torch.autograd.grad(surrogate.losses.sum(), policy)
    return surrogate, gradient


def test_a_token_that_is_pushed_further_away_is_left_out() -> None:
    """A move of 0.3 is beyond 0.2: risen with A > 0 and fallen with A < 0 are left out."""
    surrogate, gradient = _run(DppoTvLoss())
    assert surrogate.clipped.tolist() == [True, False, False, True]
    assert gradient.tolist() == pytest.approx([0.0, 1.6, -0.625, 0.0])


def test_the_thresholds_are_of_one_side_each() -> None:
    """0.4 above keeps the risen token, 0.4 below the fallen one."""
    assert _run(DppoTvLoss(threshold_high=0.4))[0].clipped.tolist() == [False] * 3 + [True]
    assert _run(DppoTvLoss(threshold_low=0.4))[0].clipped.tolist() == [True] + [False] * 3


def test_the_binary_kl_by_hand() -> None:
    """0.5 to 0.8: 0.5 log(5/8) + 0.5 log(5/2) = 0.2231; 0.8 to 0.5: 0.1927."""
    risen = 0.5 * math.log(5 / 8) + 0.5 * math.log(5 / 2)
    assert risen == pytest.approx(0.2231, abs=1e-4)
    between = DppoKlLoss(threshold_low=0.2, threshold_high=0.2)
    assert _run(between)[0].clipped.tolist() == [True, False, False, False]
    assert _run(DppoKlLoss())[0].clipped.tolist() == [True, False, False, True]


def test_a_rare_token_may_multiply() -> None:
    """1e-4 to 1e-3 is a ratio of 10 and a move of 0.0009: kept, where PPO would clip."""
    policy = torch.log(torch.tensor([1e-3]))
    surrogate = dppo_token_losses(
        policy, torch.log(torch.tensor([1e-4])), torch.ones(1), MASK[:1], config=DppoTvLoss()
    )
    assert surrogate.clipped.tolist() == [False]
    assert surrogate.ratios.item() == pytest.approx(10.0)


def test_inside_the_region_it_is_cispo_with_the_same_bound() -> None:
    """Both are then a bounded, detached weight."""
    policy = (OLD + torch.tensor([0.01, -0.01, 0.02, 0.0])).requires_grad_()
    dppo = dppo_token_losses(policy, OLD, ADVANTAGES, MASK, config=DppoTvLoss(max_ratio=1.01))
    config = CispoLoss(clip_high=0.01)
    cispo = cispo_token_losses(policy, OLD, ADVANTAGES, MASK, config=config)
    torch.testing.assert_close(dppo.losses, cispo.losses)


def test_thresholds_that_could_not_act_are_refused() -> None:
    """No probability moves by 1."""
    with pytest.raises(ValueError, match=r"'threshold_high' must be < 1.0: 1.0"):
        DppoTvLoss(threshold_high=1.0)
    with pytest.raises(ValueError, match=r"'max_ratio' must be >= 1.0: 0.5"):
        DppoKlLoss(max_ratio=0.5)
