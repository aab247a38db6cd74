"""What every advantage from rewards and groups refuses, and that advantages are data."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from algos_gspo_dapo_grpo import (
    GdpoAdvantages,
    GpgAdvantages,
    GrpoAdvantages,
    MaxRlAdvantages,
    gdpo_advantages,
    gpg_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)

IDS = torch.tensor([3, 3, 3, 8])
TOKENS = torch.tensor([1, 0, 3, 4])


def _unchecked(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As users call it: without the shape checker of the tests."""
    unwrapped: Callable[..., Tensor] = inspect.unwrap(function)
    return unwrapped


def _grpo(rewards: Tensor, ids: Tensor, accepted: Tensor | None) -> Tensor:
    return _unchecked(grpo_advantages)(rewards, ids, config=GrpoAdvantages(), accepted=accepted)


def _rloo(rewards: Tensor, ids: Tensor, accepted: Tensor | None) -> Tensor:
    return _unchecked(rloo_advantages)(rewards, ids, accepted=accepted)


def _gpg(rewards: Tensor, ids: Tensor, accepted: Tensor | None) -> Tensor:
    return _unchecked(gpg_advantages)(rewards, ids, config=GpgAdvantages(), accepted=accepted)


def _maxrl(rewards: Tensor, ids: Tensor, accepted: Tensor | None) -> Tensor:
    return _unchecked(maxrl_advantages)(rewards, ids, config=MaxRlAdvantages(), accepted=accepted)


def _opo(rewards: Tensor, ids: Tensor, accepted: Tensor | None) -> Tensor:
    return _unchecked(opo_advantages)(rewards, ids, TOKENS, accepted=accepted)


def _baseline(rewards: Tensor, ids: Tensor, accepted: Tensor | None) -> Tensor:
    function = _unchecked(reinforce_plus_plus_baseline_advantages)
    return function(rewards, ids, TOKENS, accepted=accepted)


METHODS = (_grpo, _rloo, _gpg, _maxrl, _opo, _baseline)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("ids", "accepted", "message"),
    [
        (IDS[:2], None, r"expected group_ids of shape \(4,\), one per sample, got \(2,\)"),
        (IDS.float(), None, r"group_ids of an integer dtype, got torch.float32; group_ids_of"),
        (IDS, torch.ones(1, dtype=torch.bool), r"expected accepted of shape \(4,\), .* got \(1,\)"),
        (IDS, torch.ones(4), r"expected accepted of dtype torch.bool, got torch.float32"),
    ],
)
def test_groups_that_do_not_fit_the_rewards_are_refused(
    method: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    ids: Tensor,
    accepted: Tensor | None,
    message: str,
) -> None:
    """One verdict for all would be broadcast, and cut ids would group by accident."""
    with pytest.raises(ValueError, match=message):
        method(torch.tensor([1.0, 2.0, 0.0, 4.0]), ids, accepted)


@pytest.mark.parametrize("method", METHODS)
def test_no_gradient_comes_out_of_rewards(
    method: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> None:
    """Rewards of a model with a graph make advantages without one."""
    rewards = torch.tensor([1.0, 2.0, 0.0, 4.0], requires_grad=True)
    assert not method(rewards, IDS, None).requires_grad


def test_lengths_and_baselines_of_another_shape_are_refused() -> None:
    """One length for all samples would be broadcast."""
    rewards = torch.tensor([1.0, 2.0, 0.0, 4.0])
    one = torch.tensor([5])
    with pytest.raises(ValueError, match=r"expected num_tokens of shape \(4,\)"):
        _unchecked(opo_advantages)(rewards, IDS, one)
    with pytest.raises(ValueError, match=r"expected num_tokens of shape \(4,\)"):
        _unchecked(reinforce_plus_plus_baseline_advantages)(rewards, IDS, one)
    with pytest.raises(ValueError, match=r"expected greedy_rewards of shape \(4,\)"):
        _unchecked(remax_advantages)(rewards, one.float())
    with pytest.raises(ValueError, match=r"expected num_tokens of shape \(4,\)"):
        _unchecked(gdpo_advantages)(
            rewards[:, None], IDS, config=GdpoAdvantages(weights=(1.0,)), num_tokens=one
        )
