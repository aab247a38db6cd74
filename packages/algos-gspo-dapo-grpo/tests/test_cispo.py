"""Clipped and detached weights."""

import pytest
import torch
from torch import Tensor

from algos_gspo_dapo_grpo import CispoLoss, GpgLoss, Surrogate, cispo_token_losses, gpg_token_losses

MASK = torch.tensor([True, True, True, False])
ADVANTAGES = torch.tensor([1.0, 1.0, -2.0, 5.0])


def _logs(*ratios: float) -> Tensor:
    return torch.log(torch.tensor(ratios)).requires_grad_()


def _gradient(surrogate: Surrogate, policy: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(surrogate.losses[MASK].sum(), policy)
    values: list[float] = gradient.tolist()
    return values


def test_the_weight_is_bounded_and_the_gradient_lives() -> None:
    """Ratios 1/2, 8 and 3 with a bound of 5: gradients -0.5, -5 and +6."""
    policy = _logs(0.5, 8.0, 3.0, 9.0)
    surrogate = cispo_token_losses(policy, torch.zeros(4), ADVANTAGES, MASK, config=CispoLoss())
    assert _gradient(surrogate, policy) == pytest.approx([-0.5, -5.0, 6.0, 0.0])
    assert surrogate.clipped.tolist() == [False, True, False, False]
    assert surrogate.losses[1].item() == pytest.approx(-5.0 * torch.log(torch.tensor(8.0)).item())


def test_a_lower_bound_lifts_the_weight() -> None:
    """The ratio 1/2 counts as 0.8."""
    policy = _logs(0.5, 1.0, 1.0, 1.0)
    config = CispoLoss(clip_low=0.2)
    surrogate = cispo_token_losses(policy, torch.zeros(4), ADVANTAGES, MASK, config=config)
    assert _gradient(surrogate, policy) == pytest.approx([-0.8, -1.0, 2.0, 0.0])


def test_at_ratio_one_it_is_gpg() -> None:
    """On policy both are REINFORCE."""
    policy = torch.randn(4, requires_grad=True)
    here = policy.detach()
    cispo = cispo_token_losses(policy, here, ADVANTAGES, MASK, config=CispoLoss())
    gpg = gpg_token_losses(policy, here, ADVANTAGES, MASK, config=GpgLoss())
    assert _gradient(cispo, policy) == _gradient(gpg, policy) == [-1.0, -1.0, 2.0, 0.0]


def test_a_lower_bound_that_could_not_act_is_refused() -> None:
    """Ratios are positive."""
    with pytest.raises(ValueError, match=r"CispoLoss: expected clip_low between 0 and 1"):
        CispoLoss(clip_low=1.0)
