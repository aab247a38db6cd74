"""Means with global denominators."""

import pytest
import torch

from algos_gspo_dapo_grpo import (
    Aggregation,
    BatchCounts,
    FixedNormaliser,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    Sequences,
    TokenMean,
    aggregate,
    aggregate_sequences,
    count_batch,
)

ALL: tuple[Aggregation, ...] = (
    TokenMean(),
    SequenceMeanTokenMean(),
    SequenceMeanTokenSum(),
    FixedNormaliser(normaliser=10.0),
)
EVERY_KIND = pytest.mark.parametrize("aggregation", ALL, ids=lambda value: value.kind)


def _padded(
    losses: torch.Tensor, mask: torch.Tensor, aggregation: Aggregation, counts: BatchCounts
) -> torch.Tensor:
    batch, time = losses.shape
    sequences = Sequences.padded(batch=batch, time=time)
    return aggregate(losses, mask, sequences, aggregation=aggregation, counts=counts)


def _whole(losses: torch.Tensor, mask: torch.Tensor, aggregation: Aggregation) -> torch.Tensor:
    batch, time = losses.shape
    counts = count_batch(mask, Sequences.padded(batch=batch, time=time))
    return _padded(losses, mask, aggregation, counts)


def test_token_mean_of_uneven_micro_batches() -> None:
    """A06: 100 tokens of 0.5 and 900 of 0.3 have the mean 0.32, not the 0.40 of two means."""
    short, long = torch.full((1, 100), 0.5), torch.full((1, 900), 0.3)
    counts = BatchCounts(num_tokens=1000, num_sequences=2)
    total = sum(
        _padded(part, torch.ones_like(part, dtype=torch.bool), TokenMean(), counts)
        for part in (short, long)
    )
    assert float(total) == pytest.approx(0.32)


def test_token_mean_over_ranks() -> None:
    """A07: two tokens of loss 1 on one rank and six of 3 on another give 2.5, not 2.0."""
    rank_losses = (torch.full((1, 2), 1.0), torch.full((1, 6), 3.0))
    masks = tuple(torch.ones_like(losses, dtype=torch.bool) for losses in rank_losses)
    layouts = (Sequences.padded(batch=1, time=2), Sequences.padded(batch=1, time=6))
    counts = count_batch(masks[0], layouts[0]) + count_batch(masks[1], layouts[1])
    assert counts == BatchCounts(num_tokens=8, num_sequences=2)
    shares = [
        _padded(losses, mask, TokenMean(), counts)
        for losses, mask in zip(rank_losses, masks, strict=True)
    ]
    assert float(sum(shares)) == pytest.approx(2.5)


def test_sequence_mean_is_not_token_mean() -> None:
    """A09: five tokens of 2 and one of 10: 6.0 by sequences, 20/6 by tokens; by sums 10."""
    losses = torch.tensor([[2.0, 2.0, 2.0, 2.0, 2.0], [10.0, 9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[True] * 5, [True] + [False] * 4])
    assert float(_whole(losses, mask, SequenceMeanTokenMean())) == pytest.approx(6.0)
    assert float(_whole(losses, mask, TokenMean())) == pytest.approx(20 / 6)
    assert float(_whole(losses, mask, SequenceMeanTokenSum())) == pytest.approx(10.0)
    assert float(_whole(losses, mask, FixedNormaliser(normaliser=10.0))) == pytest.approx(1.0)


@EVERY_KIND
def test_nan_behind_the_mask_has_no_influence(aggregation: Aggregation) -> None:
    """A10: values 1, NaN, 3 with the middle masked sum to 4; the masked place has gradient 0."""
    losses = torch.tensor([[1.0, torch.nan, 3.0]], requires_grad=True)
    mask = torch.tensor([[True, False, True]])
    loss = _whole(losses, mask, aggregation)
    loss.backward()
    expected = {"sequence_mean_token_sum": 4.0, "fixed_normaliser": 0.4}.get(aggregation.kind, 2.0)
    assert loss.item() == pytest.approx(expected)
    assert losses.grad is not None
    assert losses.grad[0, 1] == 0.0
    assert losses.grad[0, 0] == losses.grad[0, 2] == pytest.approx(expected / 4)


@EVERY_KIND
def test_nan_inside_the_mask_shows(aggregation: Aggregation) -> None:
    """A10: what is wrong inside the mask is not hidden."""
    losses = torch.tensor([[1.0, torch.nan]])
    assert torch.isnan(_whole(losses, torch.tensor([[True, True]]), aggregation))


@EVERY_KIND
@pytest.mark.parametrize("counts", [(0, 0), (5, 2)], ids=["whole_batch", "micro_batch"])
def test_everything_masked_gives_zero_with_a_graph(
    aggregation: Aggregation, counts: tuple[int, int]
) -> None:
    """A11: loss 0 and gradient 0, and the backward pass still runs."""
    losses = torch.tensor([[torch.nan, torch.inf]], requires_grad=True)
    loss = _padded(
        losses,
        torch.zeros(1, 2, dtype=torch.bool),
        aggregation,
        BatchCounts(num_tokens=counts[0], num_sequences=counts[1]),
    )
    loss.backward()
    assert loss.item() == 0.0
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0.0, 0.0]]


def test_fully_masked_rows_do_not_count() -> None:
    """A12: rows of 2, 4 and a masked 9 have the mean 3, not 2."""
    losses = torch.tensor([[2.0], [4.0], [9.0]])
    mask = torch.tensor([[True], [True], [False]])
    for aggregation in (SequenceMeanTokenMean(), SequenceMeanTokenSum()):
        assert float(_whole(losses, mask, aggregation)) == pytest.approx(3.0)


@EVERY_KIND
def test_padding_changes_nothing(aggregation: Aggregation) -> None:
    """A13: the same rows padded to 8 and to 16 give the same loss and gradient."""
    rows = torch.randn(2, 8)
    mask = torch.arange(8) < torch.tensor([[3], [7]])
    results = []
    for width in (8, 16):
        losses = torch.nn.functional.pad(rows, (0, width - 8), value=5.0).requires_grad_()
        loss = _whole(losses, torch.nn.functional.pad(mask, (0, width - 8)), aggregation)
        loss.backward()
        assert losses.grad is not None
        results.append((loss.detach(), losses.grad[:, :8]))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "aggregation",
    [
        TokenMean(),
        SequenceMeanTokenMean(),
        SequenceMeanTokenSum(),
        FixedNormaliser(normaliser=7.0),
    ],
    ids=lambda aggregation: aggregation.kind,
)
def test_losses_per_sequence_are_losses_of_their_tokens(
    aggregation: Aggregation, *, weighted: bool
) -> None:
    """The same number and gradient as with a loss per token; NaN of a dead sequence has none."""
    mask = torch.tensor([True, True, False, False, True, False, True])
    sequences = Sequences.packed(torch.tensor([0, 3, 4, 7]), num_tokens=7)
    counts = BatchCounts(num_tokens=9, num_sequences=4)
    weights = torch.tensor([0.5, 2.0, torch.nan, 1.0, 3.0, 1.0, 0.0]) if weighted else None
    losses = torch.tensor([2.0, torch.nan, -1.0], requires_grad=True)
    share = aggregate_sequences(
        losses, mask, sequences, aggregation=aggregation, counts=counts, token_weights=weights
    )
    per_token = sequences.spread(losses) * (1.0 if weights is None else weights.nan_to_num())
    expected = aggregate(per_token, mask, sequences, aggregation=aggregation, counts=counts)
    torch.testing.assert_close(share, expected)
    (gradient,) = torch.autograd.grad(share, losses)
    (expected_gradient,) = torch.autograd.grad(expected, losses)
    torch.testing.assert_close(gradient[[0, 2]], expected_gradient[[0, 2]])
    assert gradient[1] == 0.0


def test_impossible_counts_are_refused() -> None:
    """More sequences than tokens cannot be: a counted sequence has a token."""
    with pytest.raises(ValueError, match=r"got 3 sequences and 2 tokens"):
        BatchCounts(num_tokens=2, num_sequences=3)
    with pytest.raises(ValueError, match=r"got -1 sequences"):
        BatchCounts(num_tokens=2, num_sequences=-1)


def test_counts_are_ints() -> None:
    """A count that is still a tensor would wait for the device in every micro-batch."""
    for wrong in (torch.tensor(2), 2.0, True):
        counts = object.__new__(BatchCounts)  # past the checker of the tests
        object.__setattr__(counts, "num_tokens", wrong)
        with pytest.raises(TypeError, match=r"expected num_tokens to be an int, got"):
            counts.__post_init__()


def test_a_normaliser_must_be_positive() -> None:
    """Dividing by zero tokens is refused where the number is given."""
    with pytest.raises(ValueError, match=r"FixedNormaliser: expected normaliser above 0"):
        FixedNormaliser(normaliser=0.0)
