"""Log-probabilities of packed tokens under VeOmni's model."""

import torch
from jaxtyping import Float
from torch import Tensor

from rl_contracts.train import TokenBatch


def token_logprobs(
    model: torch.nn.Module, batch: TokenBatch, *, temperature: float
) -> Float[Tensor, " tokens"]:
    """Log-probability of every token in the loss mask, in nats, 0 elsewhere; float32.

    The head runs on the tokens before those in the mask only, so no logits are computed that
    nobody reads. A batch without any token in its mask still goes through the whole model: other
    ranks may be waiting for this one to route their tokens.

    Raises:
        ValueError: if the mask holds the first token of a sequence, which nothing predicts, or the
            sequences do not add up to the tokens.
    """
    starts = batch.cu_seqlens[:-1].long()
    num_tokens = batch.token_ids.shape[0]
    lengths: list[int] = batch.cu_seqlens.diff().tolist()
    if sum(lengths) != num_tokens or num_tokens == 0:
        message = (
            f"expected sequences that fill the {num_tokens} tokens of the batch, at least one, "
            f"got lengths that sum to {sum(lengths)}"
        )
        raise ValueError(message)
    if bool(batch.loss_mask[starts[starts < num_tokens]].any()):
        message = (
            "loss_mask is True on the first token of a sequence, whose log-probability has no "
            "prefix to be conditioned on; mask it out"
        )
        raise ValueError(message)
    targets = batch.loss_mask.nonzero().squeeze(-1)
    output = model(
        input_ids=batch.token_ids.unsqueeze(0),
        position_ids=batch.positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=targets - 1,
        sequence_lengths=tuple(lengths),
    )
    logits = output.logits.squeeze(0).float() / temperature
    logprobs = -torch.nn.functional.cross_entropy(
        logits, batch.token_ids[targets], reduction="none"
    )
    zeros = torch.zeros(num_tokens, dtype=torch.float32, device=logits.device)
    return zeros.index_put((targets,), logprobs)
