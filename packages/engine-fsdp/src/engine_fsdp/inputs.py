"""A micro-batch as the model of one rank takes it: on the device, and this rank's slice of it."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor

from engine_fsdp.attention import PackedSequences, lay_out
from engine_fsdp.ulysses import PackedUlysses
from rl_contracts.all_ranks import from_all_ranks
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
    token_ids, positions = batch.token_ids.cpu(), batch.positions.cpu()
    starts, scored = batch.cu_seqlens.cpu(), batch.loss_mask.cpu().nonzero()[:, 0]
    num_tokens = token_ids.shape[0]
    num_ranks, rank = (
        (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    )
    if filling := -num_tokens % num_ranks:  # one more sequence, which nothing is read of
        token_ids = torch.cat([token_ids, token_ids.new_zeros(filling)])
        positions = torch.cat([positions, torch.arange(filling)])
        starts = torch.cat([starts, starts[-1:] + filling])
    length = token_ids.shape[0] // num_ranks
    # The token before predicts the token; no other token pays for the head.
    predicting = scored - 1
    borders = torch.searchsorted(predicting, torch.arange(num_ranks + 1) * length).tolist()
    own = slice(borders[rank], borders[rank + 1])
    cut = slice(rank * length, (rank + 1) * length)
    whole = lay_out(starts, device=device, dtype=dtype)
    return ModelInputs(
        token_ids=token_ids[cut].to(device),
        positions=positions[cut].to(device),
        rows=(predicting[own] - cut.start).to(device),
        targets=token_ids[scored[own]].to(device),
        packed=whole if group is None else PackedUlysses(whole=whole, group=group),
        scored=scored.to(device),
        num_tokens=num_tokens,
        row_counts=tuple(end - begin for begin, end in pairwise(borders)),
    )


def check_shared(method: str, micro_batches: Sequence[TokenBatch], *, ulysses_size: int) -> None:
    """Refuse on all ranks that those which share their sequences were given different ones.

    Raises:
        ValueError: names the ranks.
    """
    if ulysses_size == 1:
        return
    digests = from_all_ranks(_digest(micro_batches))
    for rank, digest in enumerate(digests):
        first = rank - rank % ulysses_size  # the innermost axis: neighbours share
        if digest != digests[first]:
            message = (
                f"{method}: ranks {first} to {first + ulysses_size - 1} share their sequences "
                f"(ulysses_size = {ulysses_size}), but rank {rank} was given other micro-batches "
                f"than rank {first}; deal them out to dp_size ranks and hand rank r the share "
                "r // ulysses_size"
            )
            raise ValueError(message)


def _digest(micro_batches: Sequence[TokenBatch]) -> int:
    """The same in every process for the same tokens; of loss masks and sequences too."""
    digest = 0
    for batch in micro_batches:
        for tensor in (batch.token_ids, batch.cu_seqlens, batch.loss_mask):
            digest = zlib.crc32(tensor.cpu().contiguous().numpy().tobytes(), digest)
    return digest
