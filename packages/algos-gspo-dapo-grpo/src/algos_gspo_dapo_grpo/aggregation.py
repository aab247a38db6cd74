"""How per-token losses become one number, with denominators that are known beforehand.

The choice is a value (`Aggregation`), and the counts are those of the whole batch of one
optimizer step, over all micro-batches and ranks. What `aggregate` returns for a micro-batch is
therefore a *share*: the shares of any split add up to the value of the undivided batch, and so
do their gradients. Averaging means of micro-batches does not have this property.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, assert_never, final

import attrs
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.sequences import Sequences
from algos_gspo_dapo_grpo.shapes import check_one_shape
from algos_gspo_dapo_grpo.validators import positive_validator


@final
@attrs.frozen(kw_only=True)
class TokenMean:
    """Mean over the tokens of the batch: long sequences weigh more (DAPO, arXiv:2503.14476, eq. 8).

    The paper writes the mean per group; as in its published code, it is taken over the batch of
    one optimizer step.
    """

    kind: ClassVar[Literal["token_mean"]] = "token_mean"


@final
@attrs.frozen(kw_only=True)
class SequenceMeanTokenMean:
    """Mean over sequences of each one's token mean (GRPO, arXiv:2402.03300, eq. 3)."""

    kind: ClassVar[Literal["sequence_mean_token_mean"]] = "sequence_mean_token_mean"


@final
@attrs.frozen(kw_only=True)
class SequenceMeanTokenSum:
    """Mean over sequences of each one's token sum (arXiv:2503.20783, section 3.1, undivided)."""

    kind: ClassVar[Literal["sequence_mean_token_sum"]] = "sequence_mean_token_sum"


@final
@attrs.frozen(kw_only=True)
class FixedNormaliser:
    """Mean over sequences of token sum / constant (Dr.GRPO, arXiv:2503.20783, section 3.2)."""

    kind: ClassVar[Literal["fixed_normaliser"]] = "fixed_normaliser"

    normaliser: float = attrs.field(validator=positive_validator)
    """Tokens that each sequence's sum is divided by, whatever its length.

    The paper's code uses the longest completion that may be generated. A constant, never the
    width of a padded tensor: the loss must not depend on padding.
    """


Aggregation = TokenMean | SequenceMeanTokenMean | SequenceMeanTokenSum | FixedNormaliser
"""How per-token losses become one number."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCounts:
    """Sizes of everything that one optimizer step looks at, over all micro-batches and ranks.

    Counts add up: ``counts_of_one + counts_of_other``. With data parallelism each rank counts
    its own share and the ranks add theirs before the first backward pass.
    """

    num_tokens: int
    """Tokens in the loss masks."""

    num_sequences: int
    """Sequences with at least one token in the loss mask."""

    def __post_init__(self) -> None:
        """Check that the two numbers can belong together."""
        for name in ("num_tokens", "num_sequences"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool):
                raise TypeError(
                    f"BatchCounts: expected {name} to be an int, got {type(count).__name__} "
                    f"{count!r}; count_batch makes ints, and a tensor is read once per step with "
                    "int(...)"
                )
        if not 0 <= self.num_sequences <= self.num_tokens:
            raise ValueError(
                "BatchCounts: expected 0 <= num_sequences <= num_tokens, since a counted sequence "
                f"has a token in the mask, got {self.num_sequences} sequences and "
                f"{self.num_tokens} tokens"
            )

    def __add__(self, other: "BatchCounts") -> "BatchCounts":
        return BatchCounts(
            num_tokens=self.num_tokens + other.num_tokens,
            num_sequences=self.num_sequences + other.num_sequences,
        )


def count_batch(loss_mask: Bool[Tensor, "*layout"], sequences: Sequences) -> BatchCounts:
    """Count the tokens and the live sequences of one micro-batch, or of a whole batch.

    Reads two numbers back from the device, so call it once per step, before the first forward
    pass, and add up what it returns.
    """
    tokens_of_sequence = sequences.sum(loss_mask.to(torch.float32))
    return BatchCounts(
        num_tokens=int(loss_mask.sum()), num_sequences=int((tokens_of_sequence > 0).sum())
    )


def aggregate(
    token_losses: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    aggregation: Aggregation,
    counts: BatchCounts,
) -> Float[Tensor, ""]:
    """Turn per-token losses into this micro-batch's share of the batch's loss.

    Args:
        token_losses: carries the gradient. Whatever stands outside the mask, NaN included, has
            no influence on the value and gets gradient 0. NaN inside the mask shows.
        loss_mask: True on the tokens that count.
        sequences: boundaries of the sequences.
        aggregation: the kind of mean. Sequences without a token in the mask count in none.
        counts: sizes of the whole batch; see `BatchCounts`.

    Returns:
        A scalar share, to be *added up* over micro-batches and ranks. A micro-batch, or a whole
        batch, without a token in its mask gives 0 with the graph kept, so that its backward pass
        (and the collectives in it) still runs.
    """
    check_one_shape(
        "aggregate",
        token_losses=token_losses,
        loss_mask=loss_mask,
        sequences=sequences.sequence_ids,
    )
    masked = torch.where(loss_mask, token_losses, 0.0)
    return _mean(
        masked,
        lambda: sequences.spread(_num_tokens(loss_mask, sequences, masked.dtype)),
        aggregation=aggregation,
        counts=counts,
    )


def aggregate_sequences(
    sequence_losses: Float[Tensor, " sequences"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    aggregation: Aggregation,
    counts: BatchCounts,
    token_weights: Float[Tensor, "*layout"] | None = None,
) -> Float[Tensor, ""]:
    """As `aggregate`, where each token of the mask carries the loss of its sequence.

    The same number without a loss per token: a loss that is one per sequence is multiplied by
    what its tokens weigh together.

    Args:
        sequence_losses: carries the gradient. Those of sequences without a token in the mask
            have no influence, NaN included.
        loss_mask: True on the tokens that count.
        sequences: boundaries of the sequences.
        aggregation: the kind of mean.
        counts: sizes of the whole batch.
        token_weights: factor of each token's loss, without gradient. None: 1.

    Returns:
        A scalar share, as from `aggregate`.
    """
    num_tokens = _num_tokens(loss_mask, sequences, sequence_losses.dtype)
    weights = num_tokens
    if token_weights is not None:
        masked = torch.where(loss_mask, token_weights.detach().to(sequence_losses.dtype), 0.0)
        weights = sequences.sum(masked)
    return _mean(
        weights * torch.where(num_tokens > 0, sequence_losses, 0.0),
        lambda: num_tokens,
        aggregation=aggregation,
        counts=counts,
    )


def _num_tokens(loss_mask: Tensor, sequences: Sequences, dtype: torch.dtype) -> Tensor:
    return sequences.sum(loss_mask.to(dtype))


def _mean(
    losses: Tensor,
    tokens_of_their_sequence: Callable[[], Tensor],
    *,
    aggregation: Aggregation,
    counts: BatchCounts,
) -> Tensor:
    # An empty batch has only zeros to divide.
    num_tokens, num_sequences = max(counts.num_tokens, 1), max(counts.num_sequences, 1)
    match aggregation:
        case TokenMean():
            return losses.sum() / num_tokens
        case SequenceMeanTokenMean():
            return (losses / tokens_of_their_sequence().clamp(min=1.0)).sum() / num_sequences
        case SequenceMeanTokenSum():
            return losses.sum() / num_sequences
        case FixedNormaliser(normaliser=normaliser):
            return losses.sum() / (num_sequences * normaliser)
        case _:
            assert_never(aggregation)
