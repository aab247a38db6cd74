"""Rejected tokens and sequences."""

import math

import pytest
import torch

from algos_gspo_dapo_grpo import (
    RatioBand,
    Rejection,
    Sequences,
    accepted_sequences,
    count_batch,
    dr_grpo_advantages,
    kept_mask,
)

# Ratios of two sequences: 1/2, 1, 6; then 1, 1/1000 and, outside the mask, garbage.
PROXIMAL = torch.log(torch.tensor([0.5, 1.0, 6.0, 1.0, 1e-3, 99.0]))
ROLLOUT = torch.zeros(6)
MASK = torch.tensor([True] * 5 + [False])
SEQUENCES = Sequences.packed(torch.tensor([0, 3, 6]), num_tokens=6)
NONE_OF_THE_FIRST, NONE_OF_THE_SECOND = [False] * 3 + [True] * 2, [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (
            Rejection(band=RatioBand(level="token", low=0.4, high=2.0)),
            [True, True, False, True, False],
        ),
        (Rejection(band=RatioBand(level="sequence", low=0.5, high=4.0)), NONE_OF_THE_SECOND),
        (Rejection(band=RatioBand(level="geometric", low=0.01, high=1.2)), NONE_OF_THE_FIRST),
        (Rejection(veto=0.01), NONE_OF_THE_SECOND),
        (
            Rejection(band=RatioBand(level="token", low=0.0, high=2.0), veto=0.01),
            [True, True, False, False, False],
        ),
    ],
    ids=["token", "sequence", "geometric", "veto", "both"],
)
def test_rejection_by_hand(config: Rejection, kept: list[bool]) -> None:
    """Products 3 and 1/1000, geometric means 1.44 and 0.03; one token below 1/100."""
    assert kept_mask(PROXIMAL, ROLLOUT, MASK, SEQUENCES, config=config).tolist() == [*kept, False]


def test_a_band_that_holds_everything_changes_nothing() -> None:
    """The loss mask comes back as it was."""
    config = Rejection(band=RatioBand(level="token", low=0.0, high=1e9))
    assert kept_mask(PROXIMAL, ROLLOUT, MASK, SEQUENCES, config=config).equal(MASK)


def test_a_gap_of_the_sampler_rejects_nothing() -> None:
    """A25: without a log-probability there is no ratio, and no NaN comparison drops the row."""
    rollout = torch.tensor([0.0, 0.0, math.nan, 0.0, math.nan, math.nan])
    for level in ("token", "sequence"):
        config = Rejection(
            band=RatioBand(level="token" if level == "token" else "sequence", low=0.4, high=2.0),
            veto=0.01,
        )
        assert kept_mask(PROXIMAL, rollout, MASK, SEQUENCES, config=config).equal(MASK)


def test_nan_of_the_trainer_is_kept_to_show() -> None:
    """Rejecting it would hide a broken forward pass."""
    proximal = torch.full((6,), math.nan)
    config = Rejection(band=RatioBand(level="sequence", low=0.4, high=2.0), veto=0.01)
    assert kept_mask(proximal, ROLLOUT, MASK, SEQUENCES, config=config).equal(MASK)


def test_a_rejected_sequence_is_in_no_count_and_no_baseline() -> None:
    """A04: rewards 100 (rejected) and 1 give 0 and 0, never -49.5."""
    mask = kept_mask(PROXIMAL, ROLLOUT, MASK, SEQUENCES, config=Rejection(veto=0.01))
    counts = count_batch(mask, SEQUENCES)
    assert (counts.num_tokens, counts.num_sequences) == (3, 1)
    accepted = accepted_sequences(mask, SEQUENCES)
    assert accepted.tolist() == [True, False]
    advantages = dr_grpo_advantages(
        torch.tensor([1.0, 100.0]), torch.tensor([0, 0]), accepted=accepted
    )
    assert advantages.tolist() == [0.0, 0.0]


def test_a_rejection_of_nothing_is_refused() -> None:
    """Off is written as None, where the Rejection would be; bands hold 1."""
    with pytest.raises(ValueError, match=r"expected a band, a veto or both, got neither"):
        Rejection()
    with pytest.raises(ValueError, match=r"'veto' must be < 1.0: 2.0"):
        Rejection(veto=2.0)
    with pytest.raises(ValueError, match=r"'low' must be < 1.0: 1.5"):
        RatioBand(level="token", low=1.5, high=2.0)
    with pytest.raises(ValueError, match=r"got low 0 and high infinity, which keeps everything"):
        RatioBand(level="token", low=0.0, high=math.inf)
