"""Truncated importance weights."""

import math

import pytest
import torch

from algos_gspo_dapo_grpo import TokenTruncation, truncated_weights


def test_weights_are_ratios_truncated_from_above_only() -> None:
    """Ratios 1/2, 1, 3/2 and 10 with cap 2 become 1/2, 1, 3/2 and exactly 2."""
    proximal = torch.log(torch.tensor([0.5, 1.0, 1.5, 10.0]))
    mask = torch.ones(4, dtype=torch.bool)
    weights = truncated_weights(proximal, torch.zeros(4), mask, config=TokenTruncation(cap=2.0))
    assert weights.tolist() == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert weights[3] == 2.0


@pytest.mark.parametrize("gap", [math.nan, math.inf, -math.inf])
def test_a_token_without_rollout_logprob_has_weight_one(gap: float) -> None:
    """A25: where the sampler returned nothing, the token counts as it is."""
    proximal = torch.tensor([-1.0, -2.0])
    rollout = torch.tensor([-1.5, gap])
    mask = torch.ones(2, dtype=torch.bool)
    weights = truncated_weights(proximal, rollout, mask, config=TokenTruncation())
    assert weights.tolist() == pytest.approx([math.exp(0.5), 1.0])


def test_places_outside_the_mask_have_weight_one() -> None:
    """Placeholders of prompts and padding never become weights."""
    weights = truncated_weights(
        torch.tensor([-9.0, torch.nan]),
        torch.zeros(2),
        torch.zeros(2, dtype=torch.bool),
        config=TokenTruncation(),
    )
    assert weights.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_extreme_mismatch_stays_finite(difference: float) -> None:
    """However far the policies are apart, a weight lies between 0 and the cap."""
    weights = truncated_weights(
        torch.tensor([difference]),
        torch.zeros(1),
        torch.ones(1, dtype=torch.bool),
        config=TokenTruncation(cap=2.0),
    )
    assert weights.item() == pytest.approx(2.0 if difference > 0 else 0.0)


def test_weights_carry_no_gradient() -> None:
    """A weight is data, whatever its inputs are."""
    proximal = torch.zeros(2, requires_grad=True)
    mask = torch.ones(2, dtype=torch.bool)
    assert not truncated_weights(
        proximal, torch.zeros(2), mask, config=TokenTruncation()
    ).requires_grad


def test_a_cap_below_one_is_refused() -> None:
    """It would shrink tokens on which sampler and trainer agree."""
    with pytest.raises(ValueError, match=r"'cap' must be >= 1.0: 0.5"):
        TokenTruncation(cap=0.5)
    with pytest.raises(ValueError, match=r"'cap' must be <= 4851"):
        TokenTruncation(cap=math.inf)
