"""Log-probabilities of given tokens from hidden states, without the logits of all tokens.

The output projection and the softmax run over a few rows at a time. Forward keeps one number per
row, the logarithm of the softmax's denominator; backward computes the logits again, unless they
are small enough to keep. Statistics are float32 whatever the weights are in.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

_CHUNK_BYTES = 256 * 2**20
"""float32 logits of the rows that are computed together."""

_KEPT_BYTES = 256 * 2**20
"""Up to this size, the logits are kept from forward to backward, in the type of the weights."""


def linear_logprobs(
    hidden: Float[Tensor, "rows hidden"],
    weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, " rows"],
    *,
    temperature: float,
    chunk_bytes: int = _CHUNK_BYTES,
    kept_bytes: int = _KEPT_BYTES,
) -> Float[Tensor, " rows"]:
    """``log_softmax(hidden @ weight.T / temperature)`` at `targets`, float32, in nats.

    Args:
        hidden: last hidden state of the token before each target; carries a gradient.
        weight: output projection; carries a gradient.
        targets: token ids.
        temperature: divides the logits.
        chunk_bytes: the most float32 logits at one time; at least one row is computed.
        kept_bytes: the most logits kept for the backward pass.
    """
    vocab_bytes = weight.shape[0] * torch.float32.itemsize
    chunk_rows = max(1, chunk_bytes // vocab_bytes)
    keep = hidden.shape[0] * weight.shape[0] * weight.dtype.itemsize <= kept_bytes
    logprobs: Tensor = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, chunk_rows, keep
    )
    return logprobs


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
        keep: bool,  # noqa: FBT001
    ) -> Tensor:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        denominators = torch.empty_like(logprobs)
        kept: list[Tensor] = []
        for rows in range(0, hidden.shape[0], chunk_rows):
            chunk = slice(rows, rows + chunk_rows)
            logits = hidden[chunk] @ weight.t()
            at_target = targets[chunk, None]
            # log_softmax is one fused pass on the CPU; logsumexp there is six times slower.
            log_p = (logits.float() / temperature).log_softmax(-1).gather(1, at_target)[:, 0]
            logprobs[chunk] = log_p
            target_logits = logits.gather(1, at_target)[:, 0].float() / temperature
            denominators[chunk] = target_logits - log_p
            if keep:
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
            logits = kept[index] if kept else hidden[chunk] @ weight.t()
            grad = (grads[0][chunk] / ctx.temperature)[:, None]
            minus_p = (
                logits.to(torch.float32, copy=True)
                .div_(ctx.temperature)
                .sub_(denominators[chunk, None])
                .exp_()
            )
            minus_p.mul_(-grad)
            grad_logits = minus_p.scatter_add_(1, targets[chunk, None], grad).to(weight.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            product = grad_logits.t() @ hidden[chunk]
            # Several chunks add up in float32; one alone needs no copy.
            grad_weight = product if grad_weight is None else grad_weight.float().add_(product)
        if grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None
