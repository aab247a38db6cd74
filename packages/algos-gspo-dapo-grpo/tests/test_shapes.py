"""Tensors of another shape are refused wherever they would be broadcast."""

import inspect
from collections.abc import Callable

import pytest
import torch

from algos_gspo_dapo_grpo import (
    BatchCounts,
    FixedKlCoefficient,
    KlInReward,
    Sequences,
    TokenMean,
    aggregate,
    count_batch,
    kl_k1,
    kl_penalised_rewards,
    reward_to_go,
    whitened,
)
from algos_gspo_dapo_grpo.diagnostics import share
from algos_gspo_dapo_grpo.rollout_correction import log_mismatch_ratio

TOKENS = torch.zeros(5)
ONE = torch.zeros(1)
MASK = torch.ones(5, dtype=torch.bool)
SEQUENCES = Sequences.packed(torch.tensor([0, 2, 5]), num_tokens=5)
COUNTS = BatchCounts(num_tokens=5, num_sequences=2)
IN_REWARD = KlInReward(coefficient=FixedKlCoefficient(value=0.1))


def _free(function: Callable[..., object]) -> Callable[..., object]:
    """As users call it: without the shape checker of the tests."""
    unwrapped: Callable[..., object] = inspect.unwrap(function)
    return unwrapped


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: _free(aggregate)(ONE, MASK, SEQUENCES, aggregation=TokenMean(), counts=COUNTS),
            r"aggregate: .* got token_losses \(1,\), loss_mask \(5,\), sequences \(5,\)",
        ),
        (
            lambda: _free(count_batch)(MASK[:3], SEQUENCES),
            r"Sequences.sum: .* got values \(3,\), layout \(5,\)",
        ),
        (
            lambda: _free(Sequences.spread)(SEQUENCES, ONE),
            r"Sequences.spread: .* got values \(1,\), sequences \(2,\)",
        ),
        (
            lambda: _free(log_mismatch_ratio)(TOKENS, ONE, MASK, SEQUENCES, level="token"),
            r"rollout correction: .* rollout_logprobs \(1,\)",
        ),
        (
            lambda: _free(reward_to_go)(ONE, MASK, SEQUENCES),
            r"returns: .* got values \(1,\), loss_mask \(5,\)",
        ),
        (lambda: _free(whitened)(TOKENS, ONE), r"whitened: .* got values \(5,\), weights \(1,\)"),
        (lambda: _free(kl_k1)(TOKENS, ONE), r"KL: .* got policy_logprobs \(5,\), ref_logprobs"),
        (
            lambda: _free(kl_penalised_rewards)(
                ONE, TOKENS, TOKENS, MASK, coefficient=0.1, config=IN_REWARD
            ),
            r"kl_penalised_rewards: .* got token_rewards \(1,\)",
        ),
        (
            lambda: _free(share)(TOKENS, MASK[:1], 5),
            r"a metric's share: .* got values \(5,\), mask \(1,\)",
        ),
    ],
)
def test_what_would_be_broadcast_is_refused(call: Callable[[], object], message: str) -> None:
    """One number in the place of one per token is a mistake, and the message shows both shapes."""
    with pytest.raises(ValueError, match=message):
        call()
