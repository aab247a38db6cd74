"""KL in the reward, and its coefficient."""

import math

import pytest
import torch

from algos_gspo_dapo_grpo import (
    AdaptiveKlCoefficient,
    FixedKlCoefficient,
    KlInReward,
    Sequences,
    initial_kl_coefficient,
    kl_penalised_rewards,
    next_kl_coefficient,
    outcome_token_rewards,
)

ADAPTIVE = AdaptiveKlCoefficient(initial=0.1, target=2.0, horizon=100.0)


def test_each_token_pays_for_its_distance() -> None:
    """k1 of 0.5 and -0.2 at a price of 0.1, and the outcome 1 at the last token."""
    mask = torch.tensor([True, True, False])
    sequences = Sequences.packed(torch.tensor([0, 3]), num_tokens=3)
    rewards = kl_penalised_rewards(
        outcome_token_rewards(torch.tensor([1.0]), mask, sequences),
        torch.tensor([-1.0, -1.0, math.nan], requires_grad=True),
        torch.tensor([-1.5, -0.8, math.nan]),
        mask,
        coefficient=0.1,
        config=KlInReward(coefficient=FixedKlCoefficient(value=0.1)),
    )
    assert rewards.tolist() == pytest.approx([-0.05, 1.02, 0.0])
    assert not rewards.requires_grad
    assert sequences.sum(rewards).item() == pytest.approx(0.97)


def test_a_policy_at_its_reference_pays_nothing() -> None:
    """For every estimator."""
    logprobs, paid = torch.randn(4), torch.randn(4)
    mask = torch.ones(4, dtype=torch.bool)
    price = FixedKlCoefficient(value=1.0)
    for config in (
        KlInReward(coefficient=price),
        KlInReward(coefficient=price, estimator="k2"),
        KlInReward(coefficient=price, estimator="k3"),
        KlInReward(coefficient=price, estimator="abs"),
    ):
        rewards = kl_penalised_rewards(
            paid, logprobs, logprobs, mask, coefficient=1.0, config=config
        )
        assert rewards.equal(paid)


def test_the_adaptive_coefficient_follows_its_target() -> None:
    """A KL of 2.2 is 10 % above 2: with 50 samples of 100, 5 % more; far off it is held at 20 %."""
    assert initial_kl_coefficient(ADAPTIVE) == 0.1

    def after(observed: float) -> float:
        return next_kl_coefficient(0.1, observed, num_samples=50, config=ADAPTIVE)

    assert after(2.2) == pytest.approx(0.105)
    assert after(2.0) == 0.1
    assert after(1e9) == pytest.approx(0.11)
    assert after(-5.0) == pytest.approx(0.09)


def test_the_coefficient_never_turns_negative() -> None:
    """Many samples per step and a small horizon would cross 0."""
    assert next_kl_coefficient(0.1, 0.0, num_samples=10_000, config=ADAPTIVE) == 0.0


def test_a_fixed_coefficient_stays() -> None:
    """Whatever was observed."""
    config = FixedKlCoefficient(value=0.3)
    assert initial_kl_coefficient(config) == 0.3
    assert next_kl_coefficient(0.3, math.nan, num_samples=9, config=config) == 0.3


def test_an_unusable_observation_or_estimator_is_refused() -> None:
    """NaN would stay in the coefficient for good."""
    with pytest.raises(ValueError, match=r"expected a finite observed_kl, got nan"):
        next_kl_coefficient(0.1, math.nan, num_samples=1, config=ADAPTIVE)
    with pytest.raises(ValueError, match=r"'estimator' must be in"):
        KlInReward(coefficient=ADAPTIVE, estimator="k9")  # type: ignore[arg-type]
