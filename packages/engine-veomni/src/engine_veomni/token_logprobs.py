"""Log-probabilities of packed tokens under VeOmni's model."""

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from engine_veomni.vision import Vision
from parallel_state.ulysses import gather_rows, token_slice
from rl_contracts.train import TokenBatch


def token_logprobs(
    model: torch.nn.Module,
    batch: TokenBatch,
    *,
    device: torch.device,
    temperature: float,
    ulysses_group: dist.ProcessGroup | None,
    vision: Vision | None = None,
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
        ulysses_group: ranks that share the tokens, each of which is given all of them and returns
            all logprobs; None for whole micro-batches.
        vision: of a model that sees.
    """
    own = token_slice(
        token_ids=batch.token_ids,
        positions=batch.positions,
        cu_seqlens=batch.cu_seqlens,
        loss_mask=batch.loss_mask,
        num_ranks=1 if ulysses_group is None else dist.get_world_size(ulysses_group),
        rank=0 if ulysses_group is None else dist.get_rank(ulysses_group),
    )
    places: dict[str, object] = {"position_ids": own.positions.to(device).unsqueeze(0)}
    output = model(
        input_ids=own.token_ids.to(device).unsqueeze(0),
        **(places if vision is None else vision.inputs(batch)),
        use_cache=False,
        labels=own.targets.to(device).unsqueeze(0),
        scored_rows=own.rows.to(device),
        temperature=temperature,
        sequence_lengths=tuple(own.cu_seqlens.diff().tolist()),
        cu_seqlens=own.cu_seqlens.to(device, torch.int32),
        ulysses_group=ulysses_group,
    )
    logprobs: Tensor = output.loss
    if ulysses_group is not None:
        logprobs = gather_rows(logprobs, own.row_counts, ulysses_group)
    zeros = torch.zeros(batch.token_ids.shape, dtype=torch.float32, device=device)
    return zeros.index_put((own.scored.to(device),), logprobs)
