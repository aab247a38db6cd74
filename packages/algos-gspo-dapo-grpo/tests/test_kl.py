"""KL estimators and the KL term."""

import math

import pytest
import torch

from algos_gspo_dapo_grpo import (
    KlLossEstimator,
    KlPenalty,
    kl_abs,
    kl_estimate,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_penalty,
)


def test_the_three_estimators_by_hand() -> None:
    """Policy -1 and ref -1.5: k1 0.5, k2 0.125, k3 e^-0.5 - 0.5."""
    policy, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl_k1(policy, ref).item() == pytest.approx(0.5)
    assert kl_k2(policy, ref).item() == pytest.approx(0.125)
    assert kl_k3(policy, ref).item() == pytest.approx(math.exp(-0.5) - 0.5)


def test_all_three_agree_with_the_exact_kl_for_close_policies() -> None:
    """In expectation over the policy, k1 and k3 are KL(policy || ref), and k2 nearly so."""
    policy = torch.log_softmax(torch.tensor([1.0, 0.5, -0.2, 0.0], dtype=torch.float64), 0)
    ref = torch.log_softmax(torch.tensor([0.9, 0.6, -0.2, 0.1], dtype=torch.float64), 0)
    exact = (policy.exp() * (policy - ref)).sum()
    torch.testing.assert_close((policy.exp() * kl_k1(policy, ref)).sum(), exact)
    torch.testing.assert_close((policy.exp() * kl_k3(policy, ref)).sum(), exact)
    torch.testing.assert_close((policy.exp() * kl_k2(policy, ref)).sum(), exact, rtol=0.1, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("difference", [-1e4, -100.0, -20.0, 20.0, 100.0, 1e4])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_extreme_log_ratios_keep_value_and_gradient_finite(
    estimator: str, difference: float, dtype: torch.dtype
) -> None:
    """A14: exp(100) overflows float32; value and gradient stay finite, k3 at its cap of 10."""
    policy = torch.zeros(1, dtype=dtype, requires_grad=True)
    ref = torch.tensor([difference], dtype=dtype)
    value = (kl_k2 if estimator == "k2" else kl_k3)(policy, ref)
    value.sum().backward()
    assert policy.grad is not None
    assert torch.isfinite(policy.grad).all()
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    if estimator == "k3":
        assert value.item() == 10.0
    else:
        assert value.item() == pytest.approx(difference**2 / 2, rel=0.01)


def test_the_ordinary_range_is_untouched_by_the_caps() -> None:
    """A14: below the cap k3 is exp(d) - d - 1 with gradient 1 - exp(d)."""
    differences = torch.linspace(-10.9, 2.6, 100, dtype=torch.float64)
    policy = torch.zeros(100, dtype=torch.float64, requires_grad=True)
    values = kl_k3(policy, differences)
    values.sum().backward()
    torch.testing.assert_close(values.detach(), differences.exp() - differences - 1)
    torch.testing.assert_close(policy.grad, 1 - differences.exp())


def test_k3_of_nearly_equal_policies_keeps_its_digits() -> None:
    """At d = 1e-4 float32 k3 is 5e-9; exp(d) - 1 - d alone would give 0 or noise of 1e-7."""
    value = kl_k3(torch.zeros(1), torch.tensor([1e-4])).item()
    assert value == pytest.approx(5e-9, rel=0.01)


def test_k1_as_a_loss_is_refused_with_the_reason() -> None:
    """A15: the gradient of k1 is 1 whatever the reference says, so it cannot pull towards it."""
    for ref in (-1.5, -3.0):
        policy = torch.tensor([-1.0], requires_grad=True)
        kl_k1(policy, torch.tensor([ref])).sum().backward()
        assert policy.grad is not None
        assert policy.grad.item() == 1.0
    with pytest.raises(ValueError, match=r"'k1' has no effect as a loss.*use 'k2' or 'k3'"):
        KlPenalty(coefficient=0.1, estimator="k1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one of 'k2', 'k3', 'abs', 'k1\+', .*; got 'k4'"):
        KlPenalty(coefficient=0.1, estimator="k4")  # type: ignore[arg-type]


def test_k2_pulls_towards_the_reference() -> None:
    """A15: its gradient is policy - ref: 0.5 and 2."""
    for ref, expected in ((-1.5, 0.5), (-3.0, 2.0)):
        policy = torch.tensor([-1.0], requires_grad=True)
        kl_penalty(
            policy, torch.tensor([ref]), config=KlPenalty(coefficient=1.0, estimator="k2")
        ).sum().backward()
        assert policy.grad is not None
        assert policy.grad.item() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_reference_gets_no_gradient(estimator: str) -> None:
    """A reference tensor that could carry a gradient gets none."""
    policy = torch.tensor([-1.0], requires_grad=True)
    ref = torch.tensor([-2.0], requires_grad=True)
    config = KlPenalty(coefficient=1.0, estimator="k2" if estimator == "k2" else "k3")
    kl_penalty(policy, ref, config=config).sum().backward()
    assert policy.grad is not None
    assert ref.grad is None


def test_a_coefficient_of_zero_is_refused() -> None:
    """A KL term that does nothing is written as None."""
    with pytest.raises(ValueError, match=r"KlPenalty: expected coefficient above 0"):
        KlPenalty(coefficient=0.0)


def test_abs_is_the_distance_of_the_logprobs() -> None:
    """Policy -1 against -1.5 and -0.5: 0.5 both times, with gradients +1 and -1."""
    policy = torch.tensor([-1.0, -1.0], requires_grad=True)
    values = kl_abs(policy, torch.tensor([-1.5, -0.5]))
    values.sum().backward()
    assert values.tolist() == [0.5, 0.5]
    assert policy.grad is not None
    assert policy.grad.tolist() == [1.0, -1.0]


@pytest.mark.parametrize("estimator", ["k1+", "k3+", "abs+"])
def test_straight_through_has_one_value_and_the_gradient_of_k2(estimator: KlLossEstimator) -> None:
    """A15: exactly the plain estimator's value, and exactly policy - ref as gradient."""
    ref = torch.tensor([-1.5, -3.0, -0.2, 1e4])
    plain = {"k1+": kl_k1, "k3+": kl_k3, "abs+": kl_abs}[estimator]
    policy = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    config = KlPenalty(coefficient=1.0, estimator=estimator)
    value = kl_penalty(policy, ref, config=config)
    value.sum().backward()
    assert value.equal(plain(policy, ref))
    assert policy.grad is not None
    assert policy.grad.equal(policy.detach() - ref)


def test_every_estimator_has_a_name() -> None:
    """The choice by name is the function of that name."""
    policy, ref = torch.randn(5), torch.randn(5)
    assert kl_estimate(policy, ref, estimator="k1").equal(kl_k1(policy, ref))
    assert kl_estimate(policy, ref, estimator="k2").equal(kl_k2(policy, ref))
    assert kl_estimate(policy, ref, estimator="k3").equal(kl_k3(policy, ref))
    assert kl_estimate(policy, ref, estimator="abs").equal(kl_abs(policy, ref))
