"""Weights against the mismatch of sampler and trainer."""

import math

import pytest
import torch
from torch import Tensor

from algos_gspo_dapo_grpo import (
    BatchCounts,
    Bypass,
    GrpoLoss,
    GspoLoss,
    ImportanceWeighting,
    LossShare,
    Sequences,
    SequenceTruncation,
    TokenTruncation,
    WeightMasking,
    correction_weights,
    effective_sample_fraction,
    policy_loss,
)

# Ratios of two sequences: 1/2, 2 and 4; then 10 and, outside the mask, garbage.
PROXIMAL = torch.log(torch.tensor([0.5, 2.0, 4.0, 10.0, 7.0]))
MASK = torch.tensor([True, True, True, True, False])
SEQUENCES = Sequences.packed(torch.tensor([0, 3, 5]), num_tokens=5)
EVERY_WEIGHT = pytest.mark.parametrize(
    "config",
    [
        TokenTruncation(),
        SequenceTruncation(),
        SequenceTruncation(level="geometric"),
        WeightMasking(),
        WeightMasking(level="sequence", low=0.0, high=2.0),
        WeightMasking(level="geometric"),
    ],
    ids=["tis", "sequence", "geometric", "icepop", "mis", "geometric_masked"],
)


def _weights(config: ImportanceWeighting, rollout: Tensor | None = None) -> list[float]:
    rollout = torch.zeros(5) if rollout is None else rollout
    weights, *_ = correction_weights(PROXIMAL, rollout, MASK, SEQUENCES, config=config)
    values: list[float] = weights.tolist()
    return values


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TokenTruncation(cap=2.0), [0.5, 2.0, 2.0, 2.0, 1.0]),
        (SequenceTruncation(cap=5.0), [4.0, 4.0, 4.0, 5.0, 1.0]),
        (SequenceTruncation(level="geometric", cap=9.0), [4 ** (1 / 3)] * 3 + [9.0, 1.0]),
        (WeightMasking(low=0.6, high=5.0), [0.0, 2.0, 4.0, 0.0, 1.0]),
        (WeightMasking(level="sequence", low=0.0, high=5.0), [4.0, 4.0, 4.0, 0.0, 1.0]),
        (WeightMasking(level="geometric", low=0.5, high=2.0), [4 ** (1 / 3)] * 3 + [0.0, 1.0]),
    ],
    ids=["tis", "sequence", "geometric", "icepop", "mis", "geometric_masked"],
)
def test_weights_by_hand(config: ImportanceWeighting, expected: list[float]) -> None:
    """Token ratios, their product 4 and 10, or the cube root of 4; cut to the cap or to 0."""
    assert _weights(config) == pytest.approx(expected)


@EVERY_WEIGHT
def test_sequences_of_one_token_know_one_level(config: ImportanceWeighting) -> None:
    """Product, mean and token ratio are the same number, and so are the weights."""
    log_ratios = torch.tensor([-1.0, -0.1, 0.0, 0.3, 3.0])
    mask = torch.ones(5, dtype=torch.bool)
    sequences = Sequences.packed(torch.arange(6), num_tokens=5)
    token_level: ImportanceWeighting
    match config:
        case TokenTruncation() | SequenceTruncation():
            token_level = TokenTruncation(cap=config.cap)
        case WeightMasking():
            token_level = WeightMasking(low=config.low, high=config.high)
    zeros = torch.zeros(5)
    actual = correction_weights(log_ratios, zeros, mask, sequences, config=config)
    expected = correction_weights(log_ratios, zeros, mask, sequences, config=token_level)
    torch.testing.assert_close(actual[:2], expected[:2])


@EVERY_WEIGHT
@pytest.mark.parametrize("gap", [math.nan, math.inf, -math.inf])
def test_a_token_without_rollout_logprob_has_ratio_one(
    config: ImportanceWeighting, gap: float
) -> None:
    """A25: where the sampler returned nothing, the token counts as if the policies agreed."""
    missing = torch.tensor([0.0, gap, 0.0, gap, gap])
    agreeing = torch.where(torch.isfinite(missing), missing, PROXIMAL)
    assert _weights(config, missing) == pytest.approx(_weights(config, agreeing))
    assert _weights(TokenTruncation(), missing)[1] == 1.0


@EVERY_WEIGHT
@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_extreme_mismatch_stays_finite(config: ImportanceWeighting, difference: float) -> None:
    """However far the policies are apart, a weight lies between 0 and its bound."""
    mask = torch.ones(5, dtype=torch.bool)
    far = torch.full((5,), difference)
    weights, bounded, _ = correction_weights(far, torch.zeros(5), mask, SEQUENCES, config=config)
    truncated = not isinstance(config, WeightMasking)
    expected = 2.0 if truncated and difference > 0 else 0.0
    assert weights.tolist() == pytest.approx([expected] * 5, abs=1e-8)
    if difference > 0:
        assert bounded.all()


@EVERY_WEIGHT
def test_weights_carry_no_gradient(config: ImportanceWeighting) -> None:
    """A weight is data, whatever its inputs are."""
    proximal = torch.zeros(5, requires_grad=True)
    weights, *_ = correction_weights(proximal, torch.zeros(5), MASK, SEQUENCES, config=config)
    assert not weights.requires_grad


def test_nan_of_the_trainer_shows() -> None:
    """A broken trainer is not a gap of the sampler."""
    proximal = torch.tensor([math.nan, 0.0, 0.0, 0.0, 0.0])
    for config in (TokenTruncation(), SequenceTruncation(), WeightMasking()):
        weights, *_ = correction_weights(proximal, torch.zeros(5), MASK, SEQUENCES, config=config)
        assert math.isnan(weights[0])


def _loss(
    config: GrpoLoss | GspoLoss, proximal: Tensor | None, rollout: Tensor | None
) -> LossShare:
    policy = torch.tensor([-1.0, -2.0, -0.5, -1.5, 0.0], requires_grad=True)
    return policy_loss(
        policy,
        proximal_logprobs=proximal,
        advantages=torch.tensor([1.0, -2.0]),
        loss_mask=MASK,
        sequences=SEQUENCES,
        config=config,
        counts=BatchCounts(num_tokens=4, num_sequences=2),
        rollout_logprobs=rollout,
    )


@pytest.mark.parametrize("config", [GrpoLoss, GspoLoss], ids=["grpo", "gspo"])
def test_bypass_puts_the_sampler_in_the_place_of_the_proximal_policy(
    config: type[GrpoLoss] | type[GspoLoss],
) -> None:
    """The loss is the one that proximal = rollout gives; a gap has ratio 1."""
    rollout = torch.tensor([-1.1, -2.3, math.nan, -1.4, math.nan])
    bypass = _loss(config(rollout_correction=Bypass()), None, rollout)
    stand_in = torch.tensor([-1.1, -2.3, -0.5, -1.4, 0.0])
    assert bypass.loss.equal(_loss(config(), stand_in, None).loss)
    assert bypass.metrics["mismatch/gap/fraction"].item() == pytest.approx(1 / 4)
    assert not [name for name in bypass.metrics if name.startswith("correction/")]


def test_settings_of_one_way_cannot_be_given_to_the_other() -> None:
    """Bypass has no cap, takes no proximal log-probabilities and needs the sampler's."""
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'cap'"):
        Bypass(cap=2.0)  # type: ignore[call-arg]
    bypass = GrpoLoss(rollout_correction=Bypass())
    with pytest.raises(ValueError, match=r"rollout_correction is Bypass, which.*would ignore them"):
        _loss(bypass, torch.zeros(5), torch.zeros(5))
    with pytest.raises(ValueError, match=r"rollout_correction is set and needs rollout_logprobs"):
        _loss(bypass, None, None)


def test_masked_weights_and_the_effective_sample_size_are_reported() -> None:
    """Weights 0, 1, 1, 2 of four tokens: mean 1, mean square 1.5, two thirds effective."""
    rollout = torch.log(torch.tensor([9.0, 1.0, 1.0, 0.5, 1.0]))
    correction = WeightMasking(level="token", low=0.5, high=5.0)
    share = _loss(GrpoLoss(rollout_correction=correction), torch.zeros(5), rollout)
    assert share.metrics["correction/masked/fraction"].item() == pytest.approx(1 / 4)
    mean = share.metrics["correction/weight/mean"].item()
    square = share.metrics["correction/weight_square/mean"].item()
    assert (mean, square) == pytest.approx((1.0, 1.5))
    assert effective_sample_fraction(mean, square) == pytest.approx(2 / 3)
    assert effective_sample_fraction(0.0, 0.0) == 0.0


def test_bounds_that_could_not_act_are_refused() -> None:
    """A cap below 1 shrinks tokens on which both agree; so does a band without 1 in it."""
    with pytest.raises(ValueError, match=r"'cap' must be >= 1.0: 0.5"):
        TokenTruncation(cap=0.5)
    with pytest.raises(ValueError, match=r"'cap' must be <= 4851"):
        SequenceTruncation(cap=math.inf)
    with pytest.raises(ValueError, match=r"'low' must be < 1.0: 1.0"):
        WeightMasking(low=1.0)
    with pytest.raises(ValueError, match=r"'high' must be > 1.0: 1.0"):
        WeightMasking(high=1.0)
