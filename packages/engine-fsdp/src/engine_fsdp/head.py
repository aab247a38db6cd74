"""Log-probabilities of given tokens from hidden states, without the logits of all tokens.

The output projection and the softmax run over a few rows at a time. Forward keeps one number per
row, the logarithm of the softmax's denominator; backward computes the logits again, except those
of the first rows, which are kept as far as a budget goes. Statistics are float32 whatever the
weights are in.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from engine_fsdp.head_rows import add_product, logit_gradient, row_statistics

_CHUNK_BYTES = {"cpu": 256 * 2**20, "cuda": 2**31}
"""float32 logits of the rows that are computed together. A GPU has the memory for larger products,
and needs them to be busy."""

_ROW_STEP = 128
"""Rows of a tile of a matrix product on GPUs."""


class TokenStatistics(NamedTuple):
    """What the policy says of given tokens; float32, in nats."""

    logprobs: Float[Tensor, " tokens"]
    """Log-probability of the token."""

    entropies: Float[Tensor, " tokens"]
    """Entropy of the distribution that the token is drawn from; carries no gradient."""


def linear_logprobs(
    hidden: Float[Tensor, "rows hidden"],
    weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, " rows"],
    *,
    temperature: float,
    kept_bytes: int,
    chunk_bytes: int | None = None,
) -> Float[Tensor, " rows"]:
    """``log_softmax(hidden @ weight.T / temperature)`` at `targets`, float32, in nats.

    Args:
        hidden: last hidden state of the token before each target; carries a gradient.
        weight: output projection; carries a gradient.
        targets: token ids.
        temperature: divides the logits.
        kept_bytes: the most logits kept for the backward pass, in the type of the weights.
        chunk_bytes: the most float32 logits at one time; at least one row is computed. None: what
            suits the device.
    """
    chunk_rows = _chunk_rows(weight, chunk_bytes)
    kept_chunks = kept_bytes // (chunk_rows * weight.shape[0] * weight.dtype.itemsize)
    if hidden.shape[0] * weight.shape[0] * weight.dtype.itemsize <= kept_bytes:
        kept_chunks = hidden.shape[0]  # also a last chunk that is not full
    logprobs: Tensor = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, chunk_rows, kept_chunks
    )
    return logprobs


@torch.no_grad()
def linear_statistics(
    hidden: Float[Tensor, "rows hidden"],
    weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, " rows"],
    *,
    temperature: float,
    chunk_bytes: int | None = None,
) -> TokenStatistics:
    """What `linear_logprobs` returns, and the entropy of each row's distribution, in nats."""
    chunk_rows = _chunk_rows(weight, chunk_bytes)
    logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    entropies = torch.empty_like(logprobs)
    for rows in range(0, hidden.shape[0], chunk_rows):
        chunk = slice(rows, rows + chunk_rows)
        logits = hidden[chunk] @ weight.t()
        found = row_statistics(logits, targets[chunk], temperature, with_entropy=True)
        logprobs[chunk], entropies[chunk] = found.logprobs, found.entropies
    return TokenStatistics(logprobs, entropies)


def _chunk_rows(weight: Tensor, chunk_bytes: int | None) -> int:
    if chunk_bytes is None:
        chunk_bytes = _CHUNK_BYTES.get(weight.device.type, _CHUNK_BYTES["cuda"])
    rows = max(1, chunk_bytes // (weight.shape[0] * torch.float32.itemsize))
    # Whole tiles of a matrix product, if there are any.
    return rows if rows < _ROW_STEP else rows // _ROW_STEP * _ROW_STEP


class _LinearLogprobs(torch.autograd.Function):
    """With logits z = h W^T / T and p = softmax(z), d logprob / d z = onehot(target) - p."""

    @staticmethod
    def forward(  # noqa: PLR0917  # autograd functions take positional arguments
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_rows: int,
        kept_chunks: int,
    ) -> Tensor:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        denominators = torch.empty_like(logprobs)
        kept: list[Tensor] = []
        for rows in range(0, hidden.shape[0], chunk_rows):
            chunk = slice(rows, rows + chunk_rows)
            logits = hidden[chunk] @ weight.t()
            found = row_statistics(logits, targets[chunk], temperature, with_entropy=False)
            logprobs[chunk], denominators[chunk] = found.logprobs, found.denominators
            # Without a gradient nothing comes back for them.
            if len(kept) < kept_chunks and any(ctx.needs_input_grad):
                kept.append(logits)
        ctx.save_for_backward(hidden, weight, targets, denominators, *kept)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden, weight, targets, denominators, *kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        for index, rows in enumerate(range(0, hidden.shape[0], ctx.chunk_rows)):
            chunk = slice(rows, rows + ctx.chunk_rows)
            logits = kept[index] if index < len(kept) else hidden[chunk] @ weight.t()
            grad_logits = logit_gradient(
                logits, targets[chunk], denominators[chunk], grads[0][chunk], ctx.temperature
            )
            grad_hidden[chunk] = grad_logits @ weight
            if ctx.needs_input_grad[1]:  # not for a frozen head
                grad_weight = add_product(grad_weight, grad_logits, hidden[chunk])
        if ctx.needs_input_grad[1]:
            grad_weight = (
                torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
            )
        return grad_hidden, grad_weight, None, None, None, None
