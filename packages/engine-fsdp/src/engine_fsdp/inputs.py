"""A micro-batch as the model of one rank takes it: on the device, and this rank's slice of it."""

from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor

from engine_fsdp.attention import PackedSequences, lay_out
from engine_fsdp.ulysses import PackedUlysses
from parallel_state.ulysses import token_slice
from rl_contracts.train import TokenBatch


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInputs:
    """What one forward pass of this rank reads; all of it on the device."""

    token_ids: Int[Tensor, " slice"]
    """This rank's tokens: all of them without Ulysses."""

    positions: Int[Tensor, " slice"]
    """Their positions in their sequences."""

    rows: Int[Tensor, " rows"]
    """Places in the slice whose hidden state predicts a token in the loss mask."""

    targets: Int[Tensor, " rows"]
    """The tokens that they predict."""

    packed: PackedSequences
    """Where the sequences lie."""

    scored: Int[Tensor, " all_rows"]
    """Places of the predicted tokens of all ranks in the micro-batch, in order."""

    num_tokens: int
    """Tokens of the micro-batch."""

    row_counts: tuple[int, ...]
    """Rows of each rank that shares the micro-batch; they add up to `scored`."""


def model_inputs(
    batch: TokenBatch,
    *,
    device: torch.device,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> ModelInputs:
    """Cut out this rank's slice, lay out the sequences, and move it all to the device.

    Waits for the device only if the micro-batch lies there.

    Args:
        batch: as it should be, see `rl_contracts.batch_checks`.
        device: where the model computes.
        dtype: type of its hidden states.
        group: ranks that share the micro-batch, each of which is given all of it; None for whole
            micro-batches.
    """
    num_ranks, rank = (
        (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    )
    own = token_slice(
        token_ids=batch.token_ids,
        positions=batch.positions,
        cu_seqlens=batch.cu_seqlens,
        loss_mask=batch.loss_mask,
        num_ranks=num_ranks,
        rank=rank,
    )
    whole = lay_out(own.cu_seqlens, device=device, dtype=dtype)
    return ModelInputs(
        token_ids=own.token_ids.to(device),
        positions=own.positions.to(device),
        rows=own.rows.to(device),
        targets=own.targets.to(device),
        packed=whole if group is None else PackedUlysses(whole=whole, group=group),
        scored=own.scored.to(device),
        num_tokens=batch.token_ids.shape[0],
        row_counts=own.row_counts,
    )
