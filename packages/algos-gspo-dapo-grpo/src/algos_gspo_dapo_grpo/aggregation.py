"""How per-token losses become one number, with denominators that are known beforehand.

The choice is a value (`Aggregation`), and the counts are those of the whole batch of one
optimizer step, over all micro-batches and ranks. What `aggregate` returns for a micro-batch is
therefore a *share*: the shares of any split add up to the value of the undivided batch, and so
do their gradients. Averaging means of micro-batches does not have this property.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, assert_never, final

import attrs
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.sequences import Sequences


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

    normaliser: float = attrs.field(validator=attrs.validators.gt(0.0))
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
    masked = torch.where(loss_mask, token_losses, 0.0)
    # An empty batch has only zeros to divide.
    num_tokens, num_sequences = max(counts.num_tokens, 1), max(counts.num_sequences, 1)
    match aggregation:
        case TokenMean():
            return masked.sum() / num_tokens
        case SequenceMeanTokenMean():
            tokens_of_sequence = sequences.sum(loss_mask.to(masked.dtype)).clamp(min=1.0)
            return (masked / sequences.spread(tokens_of_sequence)).sum() / num_sequences
        case SequenceMeanTokenSum():
            return masked.sum() / num_sequences
        case FixedNormaliser(normaliser=normaliser):
            return masked.sum() / (num_sequences * normaliser)
        case _:
            assert_never(aggregation)
