"""Advantages that differ from token to token, as a type of their own."""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from algos_gspo_dapo_grpo.sequences import Sequences


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAdvantages:
    """One advantage per token, from `gae` or `reinforce_plus_plus_advantages`.

    A type and not a shape tells them from advantages per sequence: a packed row may have as many
    tokens as sequences, one of which is empty, and a wrong reading would be a wrong number.
    Losses whose ratio belongs to a whole sequence refuse them.
    """

    values: Float[Tensor, "*layout"]
    """In reward units."""


def per_token(
    advantages: Float[Tensor, " sequences"] | TokenAdvantages, sequences: Sequences
) -> Float[Tensor, "*layout"]:
    """One advantage per place: the token's own, or its sequence's."""
    if isinstance(advantages, TokenAdvantages):
        return advantages.values
    return sequences.spread(advantages)
