"""Log-probabilities of given tokens, computed from hidden states a few rows at a time.

It takes the place of VeOmni's loss in its model (the slot `cross_entropy_loss`), so the logits of
all tokens never exist together. Statistics are float32 whatever the weights are in; VeOmni's own
`chunk_logprobs` (0.1.12) divides by the temperature, and adds up the gradient of the weights, in
bfloat16.
"""

from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

_CHUNK_BYTES: Final = 2**31
"""float32 logits of the rows that are computed together."""


def logprobs_as_loss(
    *,
    hidden_states: Float[Tensor, "1 tokens hidden"],
    weights: Float[Tensor, "vocab hidden"],
    labels: Int[Tensor, "1 rows"],
    scored_rows: Int[Tensor, " rows"],
    temperature: float,
    **_: object,
) -> tuple[Float[Tensor, " rows"], None, None]:
    """What VeOmni's model calls: loss, logits, and further outputs of a fused loss.

    `scored_rows` are the tokens before the labels. `logits_to_keep` would not do: with labels,
    VeOmni's qwen3 hands over all tokens whatever it says, its qwen3_moe those alone (0.1.12).
    """
    hidden = hidden_states.squeeze(0)[scored_rows]
    logprobs = linear_logprobs(hidden, weights, labels.squeeze(0), temperature=temperature)
    return logprobs, None, None


def linear_logprobs(
    hidden: Float[Tensor, "rows hidden"],
    weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, " rows"],
    *,
    temperature: float,
    chunk_bytes: int = _CHUNK_BYTES,
) -> Float[Tensor, " rows"]:
    """``log_softmax(hidden @ weight.T / temperature)`` at `targets`, float32, in nats.

    Args:
        hidden: last hidden state of the token before each target; carries a gradient.
        weight: output projection; carries a gradient.
        targets: token ids.
        temperature: divides the logits.
        chunk_bytes: the most float32 logits at one time; at least one row is computed.
    """
    chunk_rows = max(1, chunk_bytes // (weight.shape[0] * torch.float32.itemsize))
    logprobs: Tensor = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, chunk_rows
    )
    return logprobs


class _LinearLogprobs(torch.autograd.Function):
    """With logits z = h W^T / T and p = softmax(z), d logprob / d z = onehot(target) - p."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take positional arguments
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_rows: int,
    ) -> Tensor:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for first in range(0, hidden.shape[0], chunk_rows):
            rows = slice(first, first + chunk_rows)
            scaled = _scaled_logits(hidden[rows], weight, temperature)
            log_p = scaled.log_softmax(dim=1, dtype=torch.float32)
            logprobs[rows] = log_p.gather(1, targets[rows, None])[:, 0]
        ctx.save_for_backward(hidden, weight, targets, logprobs)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden, weight, targets, logprobs = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for first in range(0, hidden.shape[0], ctx.chunk_rows):
            rows = slice(first, first + ctx.chunk_rows)
            scaled = _scaled_logits(hidden[rows], weight, ctx.temperature)
            # p - onehot; at the target from the float32 logprob, since 1 - p may be small
            error = scaled.softmax(dim=1).to(weight.dtype)
            at_target = logprobs[rows, None].expm1().to(weight.dtype)
            error.scatter_(1, targets[rows, None], at_target)
            # rows are scaled where they are short: before and after the products
            grad = grads[0][rows, None] / -ctx.temperature
            grad_hidden[rows] = (error @ weight).mul_(grad)
            grad_weight += error.t() @ (hidden[rows] * grad).to(weight.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature: float32, unless they are as they came."""
    logits = hidden @ weight.t()
    return logits if temperature == 1.0 else logits.float().div_(temperature)
