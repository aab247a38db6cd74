"""Tokens of large covariance."""

import math

import pytest
import torch
from torch import Tensor

from algos_gspo_dapo_grpo import (
    ClipCovLoss,
    GrpoLoss,
    KlCovLoss,
    Sequences,
    clip_cov_selection,
    clip_cov_token_losses,
    count_batch,
    grpo_token_losses,
    kl_cov_selection,
    kl_cov_token_losses,
    policy_loss,
    token_covariances,
)

SEQUENCES = Sequences.packed(torch.tensor([0, 2, 5]), num_tokens=5)
MASK = torch.tensor([True, True, True, True, False])
ADVANTAGES = torch.tensor([1.0, -1.0])
POLICY = torch.tensor([-1.0, -3.0, -1.0, -3.0, math.nan])


def _draw(config: ClipCovLoss, proximal: Tensor = POLICY, seed: int = 0) -> list[bool]:
    generator = torch.Generator().manual_seed(seed)
    selected: list[bool] = clip_cov_selection(
        POLICY, proximal, ADVANTAGES, MASK, SEQUENCES, config=config, generator=generator
    ).tolist()
    return selected


def test_covariances_by_hand() -> None:
    """Deviations +-1 of log-probability and advantage, multiplied; nothing outside the mask."""
    covariances = token_covariances(POLICY, ADVANTAGES, MASK, SEQUENCES)
    assert covariances.tolist() == [1.0, -1.0, -1.0, 1.0, 0.0]


def test_clip_cov_draws_in_its_band_what_the_clip_leaves_alone() -> None:
    """Two candidates, room for one or both; a clipped token is none."""
    one = ClipCovLoss(covariance_low=0.5)
    both = ClipCovLoss(covariance_low=0.5, fraction=0.9)
    assert _draw(both) == [True, False, False, True, False]
    drawn = {tuple(_draw(one, seed=seed)) for seed in range(20)}
    assert drawn == {(True,) + (False,) * 4, (False,) * 3 + (True, False)}
    proximal = torch.tensor([-2.0, -3.0, -1.0, -3.0, 0.0])
    only = _draw(both, proximal)
    assert only == [False, False, False, True, False]
    assert not any(_draw(ClipCovLoss()))


def test_kl_cov_takes_the_largest() -> None:
    """Of four tokens a quarter is one, the likeliest of the good sample."""
    policy = torch.tensor([-0.5, -3.0, -1.0, -3.0, math.nan])
    selected = kl_cov_selection(
        policy, ADVANTAGES, MASK, SEQUENCES, config=KlCovLoss(fraction=0.25)
    )
    assert selected.tolist() == [True] + [False] * 4
    nothing = torch.zeros(5, dtype=torch.bool)
    empty = kl_cov_selection(policy, ADVANTAGES, nothing, SEQUENCES, config=KlCovLoss())
    assert empty.equal(nothing)


def test_selected_tokens_leave_the_clip_cov_loss() -> None:
    """0 without a gradient, and the clipped surrogate everywhere else."""
    policy = torch.tensor([0.1, 0.5, -0.5, 0.0, 0.0], requires_grad=True)
    spread = SEQUENCES.spread(ADVANTAGES)
    selected = torch.tensor([True, False, False, False, False])
    surrogate = clip_cov_token_losses(
        policy, torch.zeros(5), spread, MASK, selected, config=ClipCovLoss()
    )
    plain = grpo_token_losses(policy, torch.zeros(5), spread, MASK, config=GrpoLoss())
    assert surrogate.losses[1:].equal(plain.losses[1:])
    (gradient,) = torch.autograd.grad(surrogate.losses.sum(), policy)
    assert surrogate.losses[0].item() == gradient[0].item() == 0.0


def test_selected_tokens_are_pulled_back_by_kl_cov() -> None:
    """-r A + 0.5 |log r| on the first, -r A without a clip on the second."""
    policy = torch.tensor([0.1, 0.5, 0.0, 0.0, 0.0], requires_grad=True)
    selected = torch.tensor([True, False, False, False, False])
    surrogate = kl_cov_token_losses(
        policy,
        torch.zeros(5),
        SEQUENCES.spread(ADVANTAGES),
        MASK,
        selected,
        config=KlCovLoss(coefficient=0.5),
    )
    expected = [-math.exp(0.1) + 0.05, -math.exp(0.5)]
    assert surrogate.losses[:2].tolist() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(surrogate.losses[:2].sum(), policy)
    assert gradient[:2].tolist() == pytest.approx([-math.exp(0.1) + 0.5, -math.exp(0.5)])


def test_the_selection_is_asked_for_and_refused_elsewhere() -> None:
    """Nobody chooses silently, and nobody ignores a choice."""

    def run(config: ClipCovLoss | KlCovLoss | GrpoLoss, selected: Tensor | None) -> None:
        policy_loss(
            POLICY,
            proximal_logprobs=None,
            advantages=ADVANTAGES,
            loss_mask=MASK,
            sequences=SEQUENCES,
            config=config,
            counts=count_batch(MASK, SEQUENCES),
            selected_tokens=selected,
        )

    with pytest.raises(ValueError, match=r"ClipCovLoss needs selected_tokens.*clip_cov_selection"):
        run(ClipCovLoss(), None)
    with pytest.raises(ValueError, match=r"KlCovLoss needs selected_tokens.*kl_cov_selection"):
        run(KlCovLoss(), None)
    with pytest.raises(ValueError, match=r"GrpoLoss has no use for them"):
        run(GrpoLoss(), MASK)


def test_an_empty_band_is_refused() -> None:
    """It would take nothing out."""
    with pytest.raises(ValueError, match=r"expected covariance_low < covariance_high, got 5.0 and"):
        ClipCovLoss(covariance_low=5.0, covariance_high=1.0)
