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
    ranks may be waiting for this one to route their tokens. So nothing is refused here: the batch
    has been through `rl_contracts.batch_checks`.
    """
    lengths: list[int] = batch.cu_seqlens.diff().tolist()
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
    zeros = torch.zeros_like(batch.token_ids, dtype=torch.float32)
    return zeros.index_put((targets,), logprobs)
