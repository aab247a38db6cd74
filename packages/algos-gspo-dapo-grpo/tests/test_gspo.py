"""One ratio per sequence."""

import math

import pytest
import torch

from algos_gspo_dapo_grpo import GspoLoss, Sequences, gspo_sequence_losses

WIDE = GspoLoss(clip_low=0.2, clip_high=0.2)


def test_the_ratio_is_the_geometric_mean_of_the_sampled_tokens() -> None:
    """A16: log ratios 0.2, -0.2 and a padded 5 give 1.0; padding has gradient 0, tokens share."""
    policy = torch.tensor([[0.2, -0.2, 5.0]], requires_grad=True)
    surrogate = gspo_sequence_losses(
        policy,
        torch.zeros(1, 3),
        torch.tensor([2.0]),
        torch.tensor([[True, True, False]]),
        Sequences.padded(batch=1, time=3),
        config=GspoLoss(),
    )
    surrogate.losses.sum().backward()
    assert surrogate.ratios.tolist() == pytest.approx([1.0])
    assert surrogate.losses.tolist() == pytest.approx([-2.0])
    assert policy.grad is not None
    # -A * s / |y| for each sampled token (arXiv:2507.18071, eq. 10)
    assert policy.grad.tolist() == [pytest.approx([-1.0, -1.0, 0.0])]


def test_ratios_two_and_one_half_cancel() -> None:
    """Two tokens with ratios 2 and 1/2 have the sequence ratio 1."""
    policy = torch.log(torch.tensor([2.0, 0.5]))
    surrogate = gspo_sequence_losses(
        policy,
        torch.zeros(2),
        torch.tensor([1.0]),
        torch.ones(2, dtype=torch.bool),
        Sequences.packed(torch.tensor([0, 2]), num_tokens=2),
        config=GspoLoss(),
    )
    assert surrogate.ratios.tolist() == pytest.approx([1.0])


def test_one_wild_token_does_not_clip_its_sequence() -> None:
    """A16: a token ratio of e among ten is a sequence ratio of e^0.1 = 1.105, inside 1.2."""
    policy = torch.zeros(10)
    policy[3] = 1.0
    surrogate = gspo_sequence_losses(
        policy,
        torch.zeros(10),
        torch.tensor([1.0]),
        torch.ones(10, dtype=torch.bool),
        Sequences.packed(torch.tensor([0, 10]), num_tokens=10),
        config=WIDE,
    )
    assert surrogate.ratios.tolist() == pytest.approx([math.exp(0.1)])
    assert surrogate.clipped.tolist() == [False]


def test_packed_sequences_do_not_leak_into_each_other() -> None:
    """A17: lengths 2 and 3 in one row give the ratios of the two rows of the padded layout."""
    log_ratios = ([0.1, -0.3], [0.2, 0.0, 0.1])
    advantages = torch.tensor([1.0, -1.0])
    packed = gspo_sequence_losses(
        torch.tensor([*log_ratios[0], *log_ratios[1]]),
        torch.zeros(5),
        advantages,
        torch.ones(5, dtype=torch.bool),
        Sequences.packed(torch.tensor([0, 2, 5]), num_tokens=5),
        config=WIDE,
    )
    assert packed.ratios.tolist() == pytest.approx([math.exp(-0.1), math.exp(0.1)])
    padded = gspo_sequence_losses(
        torch.tensor([[*log_ratios[0], 9.0], log_ratios[1]]),
        torch.zeros(2, 3),
        advantages,
        torch.tensor([[True, True, False], [True] * 3]),
        Sequences.padded(batch=2, time=3),
        config=WIDE,
    )
    assert packed.ratios.tolist() == padded.ratios.tolist()
    assert packed.losses.tolist() == padded.losses.tolist()


def test_a_sequence_without_tokens_has_ratio_one_and_no_gradient() -> None:
    """Nothing was sampled, so nothing changes."""
    policy = torch.tensor([[torch.nan, 3.0], [0.1, 0.1]], requires_grad=True)
    surrogate = gspo_sequence_losses(
        policy,
        torch.zeros(2, 2),
        torch.tensor([1.0, 1.0]),
        torch.tensor([[False, False], [True, True]]),
        Sequences.padded(batch=2, time=2),
        config=WIDE,
    )
    surrogate.losses.sum().backward()
    assert surrogate.ratios[0] == 1.0
    assert policy.grad is not None
    assert policy.grad[0].tolist() == [0.0, 0.0]
    assert (policy.grad[1] < 0).all()


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    """A change of 2^-10 in a log-probability moves the ratio; in bfloat16 1 + 2^-10 is 1."""
    policy = torch.tensor([2.0**-10, 2.0**-10], dtype=torch.bfloat16)
    surrogate = gspo_sequence_losses(
        policy,
        torch.zeros(2, dtype=torch.bfloat16),
        torch.tensor([1.0]),
        torch.ones(2, dtype=torch.bool),
        Sequences.packed(torch.tensor([0, 2]), num_tokens=2),
        config=WIDE,
    )
    assert surrogate.ratios.dtype == torch.float32
    assert surrogate.ratios.item() == pytest.approx(math.exp(2.0**-10), abs=1e-7)


def test_the_papers_clip_range_is_the_default() -> None:
    """3e-4 below and 4e-4 above (arXiv:2507.18071, section 5.1)."""
    assert (GspoLoss().clip_low, GspoLoss().clip_high) == (3e-4, 4e-4)
