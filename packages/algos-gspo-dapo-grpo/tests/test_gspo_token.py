"""GSPO's ratio with a gradient for each token."""

import pytest
import torch

from algos_gspo_dapo_grpo import (
    GspoLoss,
    GspoTokenLoss,
    Sequences,
    TokenAdvantages,
    count_batch,
    gspo_token_losses,
    policy_loss,
)

SEQUENCES = Sequences.packed(torch.tensor([0, 2, 3]), num_tokens=3)
MASK = torch.ones(3, dtype=torch.bool)
WIDE = GspoTokenLoss(clip_low=0.5, clip_high=0.5)


def test_the_value_is_the_sequences_ratio_and_the_gradient_the_tokens() -> None:
    """Ratios 2 and 1/2 have mean 1; with A of 1 and 3 the gradients are -1 and -3."""
    policy = torch.log(torch.tensor([2.0, 0.5, 1.0])).requires_grad_()
    surrogate = gspo_token_losses(
        policy, torch.zeros(3), torch.tensor([1.0, 3.0, 0.0]), MASK, SEQUENCES, config=WIDE
    )
    (gradient,) = torch.autograd.grad(surrogate.losses.sum(), policy)
    assert surrogate.ratios.tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert gradient.tolist() == pytest.approx([-1.0, -3.0, 0.0])


def test_with_one_advantage_per_sequence_it_is_gspo() -> None:
    """arXiv:2507.18071, section 4.3: same loss, same gradient, with and without a clip."""
    results = []
    for config in (
        GspoLoss(clip_low=0.1, clip_high=0.1),
        GspoTokenLoss(clip_low=0.1, clip_high=0.1),
    ):
        torch.manual_seed(1)
        policy = (0.2 * torch.randn(3)).requires_grad_()
        share = policy_loss(
            policy,
            proximal_logprobs=torch.zeros(3),
            advantages=torch.tensor([1.0, -2.0]),
            loss_mask=MASK,
            sequences=SEQUENCES,
            config=config,
            counts=count_batch(MASK, SEQUENCES),
        )
        results.append((share.loss.detach(), torch.autograd.grad(share.loss, policy)[0]))
    torch.testing.assert_close(results[0], results[1])


def test_a_packed_row_with_an_empty_sequence_is_not_misread() -> None:
    """Two tokens and two sequences, one of them empty: the type says what an advantage is of."""
    sequences = Sequences.packed(torch.tensor([0, 0, 2]), num_tokens=2)
    mask, values = torch.ones(2, dtype=torch.bool), torch.tensor([1.0, 3.0])
    losses = [
        policy_loss(
            torch.zeros(2),
            proximal_logprobs=None,
            advantages=advantages,
            loss_mask=mask,
            sequences=sequences,
            config=WIDE,
            counts=count_batch(mask, sequences),
        ).loss.item()
        for advantages in (values, TokenAdvantages(values=values))
    ]
    assert losses == pytest.approx([-3.0, -2.0])
