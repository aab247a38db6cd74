"""Detached shares that add up."""

import math

import pytest
import torch

from algos_gspo_dapo_grpo import (
    BatchCounts,
    clipped_surrogate,
    entropy_estimate,
    max_abs_mismatch,
    mismatch_metrics,
    surrogate_metrics,
)

MASK = torch.tensor([False, True, True, True])


def test_mismatch_by_hand() -> None:
    """Differences 0.1 and -0.3 and one gap, over 3 tokens: the gap counts as no mismatch."""
    proximal = torch.tensor([5.0, -1.0, -2.0, -3.0])
    rollout = torch.tensor([0.0, -0.9, -2.3, math.nan])
    counts = BatchCounts(num_tokens=3, num_sequences=1)
    metrics = mismatch_metrics(proximal, rollout, MASK, counts=counts)
    k3 = (math.exp(-0.1) - 1 + 0.1) + (math.exp(0.3) - 1 - 0.3)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "mismatch/k1/mean": (0.1 - 0.3) / 3,
            "mismatch/k3/mean": k3 / 3,
            "mismatch/logprob/mean": 0.4 / 3,
            "mismatch/gap/fraction": 1 / 3,
        },
        abs=1e-6,
    )


def test_the_largest_mismatch_is_a_number_of_its_own() -> None:
    """0.3 among 0.1, 0.3 and a gap; 0 where nothing is in the mask, and in an empty batch."""
    proximal = torch.tensor([5.0, -1.0, -2.0, -3.0])
    rollout = torch.tensor([0.0, -0.9, -2.3, math.nan])
    assert max_abs_mismatch(proximal, rollout, MASK).item() == pytest.approx(0.3)
    nothing = torch.zeros(4, dtype=torch.bool)
    assert max_abs_mismatch(proximal, rollout, nothing).item() == 0.0
    assert max_abs_mismatch(proximal[:0], rollout[:0], nothing[:0]).item() == 0.0


def test_a_broken_trainer_logprob_shows() -> None:
    """Only the sampler may leave gaps: NaN on the trainer's side is a fault and stays NaN."""
    proximal, rollout = torch.tensor([math.nan]), torch.tensor([-1.0])
    mask = torch.ones(1, dtype=torch.bool)
    counts = BatchCounts(num_tokens=1, num_sequences=1)
    assert max_abs_mismatch(proximal, rollout, mask).isnan()
    assert mismatch_metrics(proximal, rollout, mask, counts=counts)["mismatch/k1/mean"].isnan()


def test_ratio_metrics_by_hand() -> None:
    """Ratios 1, 2 and 5, of which one is clipped above and one dual-clipped; one is masked."""
    surrogate = clipped_surrogate(
        torch.log(torch.tensor([9.0, 1.0, 2.0, 5.0])).requires_grad_(),
        torch.tensor([1.0, 1.0, 1.0, -1.0]),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
    )
    metrics = surrogate_metrics(surrogate, MASK, 3)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "ratio/importance/mean": 8 / 3,
            "ratio/clipped/fraction": 1 / 3,
            "ratio/dual_clipped/fraction": 1 / 3,
        }
    )
    assert not any(value.requires_grad for value in metrics.values())


def test_the_entropy_estimate_by_hand() -> None:
    """Mean of 1, 2 and 3 nats over the mask; what stands outside, NaN included, has no part."""
    logprobs = torch.tensor([math.nan, -1.0, -2.0, -3.0], requires_grad=True)
    counts = BatchCounts(num_tokens=3, num_sequences=1)
    entropy = entropy_estimate(logprobs, MASK, counts=counts)
    assert entropy.item() == pytest.approx(2.0)
    assert not entropy.requires_grad


def test_the_entropy_estimate_is_the_entropy_in_expectation() -> None:
    """Over all outcomes of a die, weighted as they are drawn: log 6."""
    counts = BatchCounts(num_tokens=6, num_sequences=1)
    logprobs = torch.full((6,), -math.log(6.0))
    estimate = entropy_estimate(logprobs, torch.ones(6, dtype=torch.bool), counts=counts)
    assert estimate.item() == pytest.approx(math.log(6.0))
