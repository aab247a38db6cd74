"""The clipped surrogate: values, gradients and extremes."""

import math

import pytest
import torch

from algos_gspo_dapo_grpo import GrpoLoss, GspoLoss, clipped_surrogate


def _loss(ratio: float, advantage: float, *, dual_clip: float | None = None) -> float:
    surrogate = clipped_surrogate(
        torch.tensor([math.log(ratio)]),
        torch.tensor([advantage]),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=dual_clip,
    )
    return surrogate.losses.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.1, 2.0, -2.2), (1.5, 2.0, -2.4), (0.5, 2.0, -1.0), (1.5, -2.0, 3.0), (0.5, -2.0, 1.6)],
)
def test_the_clip_is_pessimistic(ratio: float, advantage: float, expected: float) -> None:
    """PPO eq. 7 by hand: the clip caps gains and never losses."""
    assert _loss(ratio, advantage) == pytest.approx(expected)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    """A18: ratio 10 and c 3: A = +1 gives -1.2 as before, A = -1 gives 3 instead of 10."""
    assert _loss(10.0, 1.0, dual_clip=3.0) == pytest.approx(-1.2)
    assert _loss(10.0, -1.0, dual_clip=3.0) == pytest.approx(3.0)
    assert _loss(10.0, -1.0) == pytest.approx(10.0)
    assert _loss(2.0, -1.0, dual_clip=3.0) == pytest.approx(2.0)


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0, math.nan, math.inf, 5e8])
def test_a_dual_clip_of_one_or_less_is_refused(dual_clip: float) -> None:
    """A18: c <= 1 would bound the loss where nothing has changed yet."""
    with pytest.raises(ValueError, match=r"GrpoLoss: expected dual_clip above 1 .* use None"):
        GrpoLoss(dual_clip=dual_clip)


@pytest.mark.parametrize("clip_high", [0.0, -0.2, math.nan, math.inf, 4.9e8])
def test_an_upper_clip_that_cannot_act_is_refused(clip_high: float) -> None:
    """Log ratios are held at 20, so no ratio gets above exp(20)."""
    with pytest.raises(
        ValueError, match=r"GrpoLoss: expected clip_high above 0 and below 4.85e\+08"
    ):
        GrpoLoss(clip_high=clip_high)


@pytest.mark.parametrize("clip_low", [0.0, 1.0, 10.0, math.nan])
def test_a_lower_clip_that_cannot_act_is_refused(clip_low: float) -> None:
    """A ratio is positive: a lower clip of 1 or more has no effect."""
    with pytest.raises(ValueError, match=r"GspoLoss: expected clip_low between 0 and 1"):
        GspoLoss(clip_low=clip_low)


def test_no_gradient_where_the_clip_decides() -> None:
    """Inside the range the gradient is -r A; where a clip decides it is 0."""
    log_ratios = torch.log(torch.tensor([1.1, 1.5, 0.5, 5.0])).requires_grad_()
    surrogate = clipped_surrogate(
        log_ratios,
        torch.tensor([1.0, 1.0, -1.0, -1.0]),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
    )
    surrogate.losses.sum().backward()
    assert log_ratios.grad is not None
    assert log_ratios.grad.tolist() == pytest.approx([-1.1, 0.0, 0.0, 0.0])
    assert surrogate.clipped.tolist() == [False, True, True, False]
    assert surrogate.dual_clipped is not None
    assert surrogate.dual_clipped.tolist() == [False, False, False, True]


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_extreme_ratios_keep_value_and_gradient_finite(log_ratio: float, advantage: float) -> None:
    """A14's kind: exp(100) would be infinite, and 0 * inf would be NaN in the backward pass."""
    log_ratios = torch.tensor([log_ratio], requires_grad=True)
    surrogate = clipped_surrogate(
        log_ratios, torch.tensor([advantage]), clip_low=0.2, clip_high=0.28
    )
    surrogate.losses.sum().backward()
    assert torch.isfinite(surrogate.losses).all()
    assert log_ratios.grad is not None
    assert torch.isfinite(log_ratios.grad).all()


def test_a_ratio_of_one_gives_the_policy_gradient() -> None:
    """On policy the loss is -A and its gradient -A: plain REINFORCE."""
    log_ratios = torch.zeros(3, requires_grad=True)
    advantages = torch.tensor([2.0, 0.0, -0.5])
    surrogate = clipped_surrogate(log_ratios, advantages, clip_low=0.2, clip_high=0.2)
    surrogate.losses.sum().backward()
    assert surrogate.losses.tolist() == (-advantages).tolist()
    assert log_ratios.grad is not None
    assert log_ratios.grad.tolist() == (-advantages).tolist()
