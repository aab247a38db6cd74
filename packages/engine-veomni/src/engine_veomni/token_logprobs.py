"""Log-probabilities of packed tokens under VeOmni's model."""

import torch
from jaxtyping import Float
from torch import Tensor

from rl_contracts.train import TokenBatch


def token_logprobs(
    model: torch.nn.Module, batch: TokenBatch, *, device: torch.device, temperature: float
) -> Float[Tensor, " tokens"]:
    """Log-probability of every token in the loss mask, in nats, 0 elsewhere; float32.

    The head runs on the tokens before those in the mask only, so no logits are computed that
    nobody reads. A batch without any token in its mask still goes through the whole model: other
    ranks may be waiting for this one to route their tokens. So nothing is refused here: the batch
    has been through `rl_contracts.batch_checks`.

    Args:
        model: VeOmni's, with the loss of `engine_veomni.head`.
        batch: on the CPU, where its lengths are read without waiting for the device.
        device: where the model is.
        temperature: divides the logits.
    """
    lengths: list[int] = batch.cu_seqlens.diff().tolist()
    targets = batch.loss_mask.nonzero().squeeze(-1)
    labels = batch.token_ids[targets].to(device).unsqueeze(0)
    targets = targets.to(device)
    output = model(
        input_ids=batch.token_ids.to(device).unsqueeze(0),
        position_ids=batch.positions.to(device).unsqueeze(0),
        use_cache=False,
        labels=labels,
        scored_rows=targets - 1,
        temperature=temperature,
        sequence_lengths=tuple(lengths),
        cu_seqlens=batch.cu_seqlens.to(device, torch.int32),
    )
    zeros = torch.zeros(batch.token_ids.shape, dtype=torch.float32, device=device)
    return zeros.index_put((targets,), output.loss)
