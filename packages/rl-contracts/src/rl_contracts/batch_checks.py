"""What an engine refuses of micro-batches before its ranks meet in a collective.

A rank that stopped at its own malformed micro-batch would leave the others waiting for it, so every
rank looks at its own, tells the others, and all of them refuse with the same message.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from rl_contracts.all_ranks import from_all_ranks
from rl_contracts.packed_images import PackedImages, problem_of_images
from rl_contracts.train import TokenBatch, images_of


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReport:
    """What one rank says of its micro-batches."""

    num_batches: int
    """How many it was given."""

    problem: str
    """The first malformed one, and what is wrong with it; empty if all are as they should be."""


ImageCheck = Callable[[TokenBatch, PackedImages | None], str]
"""What an engine finds wrong with the well-formed images of a micro-batch, or with there being
none, or nothing."""


def takes_no_images(batch: TokenBatch, images: PackedImages | None) -> str:
    """The `ImageCheck` of an engine whose model does not see."""
    del batch
    if images is None:
        return ""
    return (
        f"it shows {images.grids.shape[0]} images, which this engine would not look at; train a "
        "vision-language model with engine-veomni"
    )


def check_together(
    method: str,
    micro_batches: Sequence[TokenBatch],
    *,
    vocab_size: int,
    check_images: ImageCheck = takes_no_images,
) -> None:
    """Refuse on all ranks of torch.distributed what one of them would fail or wait at.

    Args:
        method: what the ranks are about to do, for the message.
        micro_batches: this rank's.
        vocab_size: token ids run from 0 to this, exclusive.
        check_images: what this engine's model wants of images. Default: none are taken.

    Raises:
        ValueError: on every rank, if one was given a malformed micro-batch, another number of
            them, or none; names the rank, the micro-batch and its trajectories.
    """
    reports = from_all_ranks(
        inspect_batches(micro_batches, vocab_size=vocab_size, check_images=check_images)
    )
    refuse_malformed(method, reports)


def check_shared(method: str, micro_batches: Sequence[TokenBatch], *, ulysses_size: int) -> None:
    """Refuse on all ranks that those which share their sequences were given different ones.

    Args:
        method: what the ranks are about to do, for the message.
        micro_batches: this rank's, checked by `check_together`.
        ulysses_size: neighbouring ranks that share every sequence.

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


def inspect_batches(
    micro_batches: Sequence[TokenBatch],
    *,
    vocab_size: int,
    check_images: ImageCheck = takes_no_images,
) -> BatchReport:
    """Look at one rank's micro-batches; reads their values."""
    problem = ""
    for index, batch in enumerate(micro_batches):
        found = _problem_of(batch, vocab_size)
        images = images_of(batch)
        if not found and images is not None:
            found = problem_of_images(images, batch.cu_seqlens)
        found = found or check_images(batch, images)
        if found:
            problem = f"{name_of(index, batch)}: {found}"
            break
    return BatchReport(num_batches=len(micro_batches), problem=problem)


def refuse_malformed(method: str, reports: Sequence[BatchReport]) -> None:
    """Compare the reports of all ranks, in the order of the ranks; see `check_together`."""
    for rank, report in enumerate(reports):
        if report.problem:
            message = f"{method}: on rank {rank}, {report.problem}"
            raise ValueError(message)
    counts = [report.num_batches for report in reports]
    if len(set(counts)) > 1 or counts[0] == 0:
        message = (
            f"{method}: expected the same number of micro-batches on every rank, at least one, "
            f"got {', '.join(map(str, counts))}; rl_contracts.packing.pack deals them out"
        )
        raise ValueError(message)


def name_of(index: int, batch: TokenBatch) -> str:
    """Place of a micro-batch, and its trajectories if it knows them."""
    names: Sequence[str] = getattr(batch, "trajectory_ids", ())
    known = f"trajectories {', '.join(names)}" if names else "without trajectory ids"
    return f"micro-batch {index} ({known})"


def _problem_of(batch: TokenBatch, vocab_size: int) -> str:
    """What is wrong with a micro-batch, or nothing; never raises, whatever its tensors hold."""
    token_ids, positions = batch.token_ids.cpu(), batch.positions.cpu()
    starts, loss_mask = batch.cu_seqlens.cpu(), batch.loss_mask.cpu()
    if problem := _problem_of_types(token_ids, positions, starts, loss_mask):
        return problem
    num_tokens = token_ids.shape[0]
    lengths = starts.diff()
    if (
        starts.shape[0] == 1
        or int(starts[0]) != 0
        or int(starts[-1]) != num_tokens
        or bool((lengths <= 0).any())
    ):
        return (
            f"expected cu_seqlens to rise from 0 to its {num_tokens} tokens, got {starts.tolist()}"
        )
    first = starts[:-1].long()
    if not torch.equal(positions, torch.arange(num_tokens) - first.repeat_interleave(lengths)):
        return "expected positions that count from 0 in each sequence"
    if bool(loss_mask[first].any()):
        return (
            "loss_mask is True on the first token of a sequence, whose log-probability has no "
            "prefix to be conditioned on; mask it out"
        )
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        return f"expected token ids from 0 to {vocab_size - 1}, got {lowest} to {highest}"
    return ""


def _problem_of_types(
    token_ids: Tensor, positions: Tensor, starts: Int[Tensor, " sequences_plus_1"], mask: Tensor
) -> str:
    num_tokens = token_ids.numel()
    for name, tensor, dtypes in (
        ("token_ids", token_ids, (torch.int64,)),
        ("positions", positions, (torch.int64,)),
        ("loss_mask", mask, (torch.bool,)),
        ("cu_seqlens", starts, (torch.int32, torch.int64)),
    ):
        if tensor.dtype not in dtypes:
            return f"expected {name} of type {dtypes[0]}, got {tensor.dtype}"
        wanted = f"({num_tokens},)" if name != "cu_seqlens" else "(sequences + 1,)"
        fits = tensor.shape == (num_tokens,) if name != "cu_seqlens" else tensor.ndim == 1
        if not fits or tensor.numel() == 0:
            return f"expected {name} of shape {wanted}, not empty, got {tuple(tensor.shape)}"
    return ""
