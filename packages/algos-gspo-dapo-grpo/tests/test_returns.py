"""Returns and generalised advantages."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from algos_gspo_dapo_grpo import Gae, Sequences, gae, outcome_token_rewards, reward_to_go

PAIR = Sequences.packed(torch.tensor([0, 2]), num_tokens=2)
LAW = settings(deadline=None, max_examples=25, derandomize=True)


def test_the_return_passes_through_tool_tokens() -> None:
    """A05: rewards 0, 0, 1, the middle token a tool's, discount 0.5; padding cuts nothing off."""
    rewards = torch.tensor([[0.0, 7.0, 1.0, torch.nan]])
    mask = torch.tensor([[True, False, True, False]])
    returns = reward_to_go(rewards, mask, Sequences.padded(batch=1, time=4), discount=0.5)
    assert returns.tolist() == [[0.5, 0.0, 1.0, 0.0]]


def test_returns_do_not_cross_sequences() -> None:
    """A17: packed sequences of 2, 0 and 1 tokens keep their own rewards."""
    sequences = Sequences.packed(torch.tensor([0, 2, 2, 3]), num_tokens=3)
    mask = torch.ones(3, dtype=torch.bool)
    assert reward_to_go(torch.tensor([1.0, 2.0, 4.0]), mask, sequences).tolist() == [3.0, 2.0, 4.0]


def test_the_outcome_is_paid_at_the_last_token_of_the_mask() -> None:
    """Not at padding, not at a tool's answer; a sequence without a token is paid nothing."""
    mask = torch.tensor([[True, True, False], [False, False, False], [False, True, True]])
    sequences = Sequences.padded(batch=3, time=3)
    paid = outcome_token_rewards(torch.tensor([5.0, 6.0, 7.0]), mask, sequences)
    assert paid.tolist() == [[0.0, 5.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 7.0]]


def test_gae_by_hand() -> None:
    """Values 0.5, ., 0.4, rewards 0, ., 1, discount 0.9, trace 0.5: the tool's value is unused.

    Surprises: 1 - 0.4 = 0.6 and 0 + 0.9 * 0.4 - 0.5 = -0.14; then -0.14 + 0.45 * 0.6 = 0.13.
    """
    estimate = gae(
        torch.tensor([[0.0, 9.0, 1.0]]),
        torch.tensor([[0.5, torch.nan, 0.4]]),
        torch.tensor([[True, False, True]]),
        Sequences.padded(batch=1, time=3),
        config=Gae(discount=0.9, trace=0.5),
    )
    assert estimate.advantages.tolist() == [pytest.approx([0.13, 0.0, 0.6])]
    assert estimate.returns.tolist() == [pytest.approx([0.63, 0.0, 1.0])]


@LAW
@given(masks=st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=5))
def test_trace_one_is_the_return_and_trace_zero_one_step(masks: list[list[bool]]) -> None:
    """With trace 1 the returns are reward-to-go; with 0 the advantage is the one-step surprise."""
    lengths = [len(mask) for mask in masks]
    mask = torch.tensor([value for row in masks for value in row], dtype=torch.bool)
    sequences = Sequences.packed(torch.tensor([0, *lengths]).cumsum(0), num_tokens=sum(lengths))
    generator = torch.Generator().manual_seed(sum(lengths))
    rewards = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    values = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    full = gae(rewards, values, mask, sequences, config=Gae(discount=0.9, trace=1.0))
    expected = reward_to_go(rewards, mask, sequences, discount=0.9)
    torch.testing.assert_close(full.returns, expected)
    one_step = gae(rewards, values, mask, sequences, config=Gae(discount=0.0, trace=0.0))
    torch.testing.assert_close(one_step.advantages, torch.where(mask, rewards - values, 0.0))


@LAW
@given(masks=st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=5))
def test_packed_equals_padded(masks: list[list[bool]]) -> None:
    """A16, A17: both layouts give the same advantages, also with NaN in the padding."""
    lengths = [len(mask) for mask in masks]
    time = max(lengths) + 1
    generator = torch.Generator().manual_seed(sum(lengths))
    padded = torch.full((2, len(masks), time), torch.nan)
    mask = torch.zeros(len(masks), time, dtype=torch.bool)
    for index, row in enumerate(masks):
        padded[:, index, : len(row)] = torch.randn(2, len(row), generator=generator)
        mask[index, : len(row)] = torch.tensor(row, dtype=torch.bool)
    real = torch.arange(time) < torch.tensor(lengths)[:, None]
    by_rows = gae(
        padded[0], padded[1], mask, Sequences.padded(batch=len(masks), time=time), config=Gae()
    )
    in_a_row = gae(
        padded[0][real],
        padded[1][real],
        mask[real],
        Sequences.packed(torch.tensor([0, *lengths]).cumsum(0), num_tokens=sum(lengths)),
        config=Gae(),
    )
    torch.testing.assert_close(by_rows.advantages[real], in_a_row.advantages)
    torch.testing.assert_close(by_rows.returns[real], in_a_row.returns)


def test_a_discount_above_one_is_refused() -> None:
    """Later rewards would outweigh earlier ones without bound."""
    with pytest.raises(ValueError, match=r"'discount' must be <= 1.0: 1.5"):
        Gae(discount=1.5)
    with pytest.raises(ValueError, match=r"reward_to_go: expected discount from 0 to 1, got 1.5"):
        reward_to_go(torch.zeros(2), torch.ones(2, dtype=torch.bool), PAIR, discount=1.5)


def test_a_trace_that_cannot_act_is_refused() -> None:
    """With discount 0 no later token counts, whatever the trace."""
    with pytest.raises(ValueError, match=r"trace 0.95 has no effect with discount 0"):
        Gae(discount=0.0)
