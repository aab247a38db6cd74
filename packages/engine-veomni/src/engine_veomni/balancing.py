"""The load-balancing loss of a mixture of experts, in shares that add up over micro-batches.

The loss is transformers' (5.19, `load_balancing_loss_func`; Switch Transformer, arXiv:2101.03961,
equations 4 to 6), over all layers and tokens of one `forward_backward` at once::

    loss = experts * sum over experts of  f * p
    f    = choices of an expert / (layers * tokens): no derivative, sums to the experts per token
    p    = mean of its router probability over layers and tokens

It is a product of two means, so the losses of micro-batches do not add up to that of the batch.
Once `f` is known, though, it is linear in `p`: with the choices of all micro-batches and ranks
counted before the first backward pass, value and gradient are those of the whole batch, however it
is split.

Tokens are those whose experts are known beforehand, prompts included: not the padding of
`rl_contracts.packing`, and with a sampler's routes not the last token of a sequence.
"""

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor


@final
class Balance:
    """The loss of one `forward_backward`: count all choices, `agree`, then add up `share`s."""

    def __init__(self, *, num_experts: int, num_layers: int, device: torch.device) -> None:
        """Begin with no choice counted.

        Args:
            num_experts: of a layer.
            num_layers: that have experts.
            device: where routers compute.
        """
        # of each expert in all layers, and the number of tokens
        self._counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        self._num_layers = num_layers
        self._weights: Float[Tensor, " experts"] | None = None
        self._total = torch.zeros((), dtype=torch.float64, device=device)

    def count(
        self, layers: Sequence[Int[Tensor, "tokens top_k"]], included: Bool[Tensor, " tokens"]
    ) -> None:
        """Count the choices of one micro-batch, given by layer."""
        for chosen in layers:
            ones = included[:, None].expand_as(chosen).flatten().long()
            self._counts[:-1].scatter_add_(0, chosen.clamp(min=0).flatten().long(), ones)
        self._counts[-1] += included.sum()

    def agree(self) -> None:
        """Add up the counts of all ranks; called on all of them, once."""
        dist.all_reduce(self._counts)
        counts = self._counts.double()
        places = (counts[-1] * self._num_layers).clamp(min=1.0)
        # experts * f / (layers * tokens): what a token's probability of an expert adds to the loss
        self._weights = ((counts.shape[0] - 1) * counts[:-1] / places.square()).float()

    def share(
        self, scores: Float[Tensor, "tokens experts"], included: Bool[Tensor, " tokens"]
    ) -> Float[Tensor, ""]:
        """What one layer adds for the tokens of one micro-batch; carries a gradient.

        Args:
            scores: the router's probabilities, float32.
            included: the tokens that were counted.
        """
        assert self._weights is not None  # noqa: S101 - the engine counts first
        # not by indexing with the mask, for which the host waits
        return torch.where(included, scores @ self._weights, 0.0).sum()

    def add(self, share: Float[Tensor, ""]) -> None:
        """Remember the value of what was added to the loss of a micro-batch."""
        self._total += share.detach()

    def value(self) -> float:
        """The loss over all ranks, without coefficient; called on all of them."""
        total = self._total.clone()
        dist.all_reduce(total)
        return total.item()
