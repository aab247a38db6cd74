"""Which tokens belong to which sequence, for packed and for padded tensors alike.

Every function of this package that needs sequences takes one `Sequences`. Both layouts are read
as one row of tokens with boundaries, so there is one implementation of each formula:

    packed   [a a | b b b]            offsets 0 2 5
    padded   [a a .]                  offsets 0 3 6, the places `.` are outside the loss mask
             [b b b]
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from algos_gspo_dapo_grpo.shapes import check_one_shape


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Boundaries of the sequences in a layout; build it with `packed` or `padded`.

    Reads no tensor value when it is built or used, so it never waits for a device.
    A sequence must be whole in the tensors it describes: with sequence parallelism the caller
    gathers the log-probabilities of a sequence first.
    """

    sequence_ids: Int[Tensor, "*layout"]
    """int32: the sequence that each place belongs to."""

    offsets: Int[Tensor, " sequences_plus_1"]
    """int32: where each sequence begins in the flattened layout, and its length last."""

    @classmethod
    def packed(
        cls, cu_seqlens: Int[Tensor, " sequences_plus_1"], *, num_tokens: int
    ) -> "Sequences":
        """Describe tensors of shape ``[tokens]`` that hold sequences end to end.

        Args:
            cu_seqlens: where each sequence begins, and `num_tokens` last. A sequence may be
                empty.
            num_tokens: length of the row, the last entry of `cu_seqlens`; given as a number so
                that nothing is read back from a device.

        Raises:
            ValueError: if `cu_seqlens` is not one row of integers with at least one entry, or, on
                the CPU, does not rise from 0 to `num_tokens`. On an accelerator its values are
                not read, which would wait for the device: check them where they are made.
        """
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(
                "Sequences.packed: expected cu_seqlens of shape (sequences + 1,), "
                f"got {tuple(cu_seqlens.shape)}"
            )
        if cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
            raise ValueError(
                f"Sequences.packed: expected cu_seqlens of an integer dtype, got {cu_seqlens.dtype}"
            )
        if not 0 <= num_tokens <= _MAX_PLACES:
            raise ValueError(
                f"Sequences.packed: expected num_tokens from 0 to {_MAX_PLACES}, got {num_tokens}"
            )
        if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_boundaries(cu_seqlens, num_tokens)
        offsets = cu_seqlens.to(torch.int32)
        places = torch.arange(num_tokens, dtype=torch.int32, device=offsets.device)
        return cls(sequence_ids=_owners(offsets, places), offsets=offsets)

    @classmethod
    def padded(cls, *, batch: int, time: int, device: torch.device | None = None) -> "Sequences":
        """Describe tensors of shape ``[batch, time]``, one sequence per row.

        Padding needs no mention: it is where the loss mask is False.
        """
        rows = torch.arange(batch, dtype=torch.int32, device=device)
        return cls(
            sequence_ids=rows.unsqueeze(1).expand(batch, time),
            offsets=torch.arange(batch + 1, dtype=torch.int32, device=device) * time,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of every per-token tensor: ``(tokens,)`` or ``(batch, time)``."""
        return tuple(self.sequence_ids.shape)

    @property
    def num_sequences(self) -> int:
        """Number of sequences, those without a token in the loss mask included."""
        return self.offsets.shape[0] - 1

    def sum(self, values: Float[Tensor, "*layout"]) -> Float[Tensor, " sequences"]:
        """Add up the values of each sequence; an empty sequence gives 0.

        Raises:
            ValueError: if the values do not have the layout's shape.
        """
        check_one_shape("Sequences.sum", values=values, layout=self.sequence_ids)
        return _apply(_SegmentSum, values, self.sequence_ids, self.offsets)

    def spread(self, values: Float[Tensor, " sequences"]) -> Float[Tensor, "*layout"]:
        """Give every place the value of its sequence.

        Raises:
            ValueError: if there is not one value per sequence.
        """
        check_one_shape("Sequences.spread", values=values, sequences=self.offsets[1:])
        return _apply(_SegmentSpread, values, self.sequence_ids, self.offsets)


# `sum` and `spread` are each other's adjoint, and saying so is worth two classes: autograd would
# turn the gradient of an indexed read into atomic additions, whose order (and last bits) change
# from run to run on a GPU. torch.segment_reduce would sum in one call, but trusts the boundaries
# with the memory, cannot be fused with what makes the values, and is not on every device.

_MAX_PLACES = 2**31 - 1
"""Places are counted in int32, which halves what is read to find a token's sequence."""

_PIECE = 256
"""Places in a row of `_summed_pieces`: enough to be read at full speed, few enough to waste little
on the last row of a sequence."""


def _check_boundaries(cu_seqlens: Int[Tensor, " sequences_plus_1"], num_tokens: int) -> None:
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != num_tokens:
        raise ValueError(
            "Sequences.packed: expected cu_seqlens to begin with 0 and to end with num_tokens "
            f"{num_tokens}, got {bounds[0]} and {bounds[-1]}: some tokens would have no sequence"
        )
    for sequence, (begin, end) in enumerate(pairwise(bounds)):
        if end < begin:
            raise ValueError(
                f"Sequences.packed: expected cu_seqlens that never fall, got {begin} and then "
                f"{end} for sequence {sequence}"
            )


def _owners(
    offsets: Int[Tensor, " sequences_plus_1"], places: Int[Tensor, " *places"]
) -> Int[Tensor, " *places"]:
    """The sequence of each place, by where sequences begin."""
    # Not among the ends, offsets[1:]: torch 2.11 cannot compile a search in a slice for a GPU.
    owners = torch.searchsorted(offsets, places, right=True, out_int32=True) - 1
    # A compiled kernel has a last block that is not full, and runs its idle threads on places
    # beyond the end. torch 2.11 checks their index too, and stops at one out of bounds.
    return owners.clamp(0, offsets.shape[0] - 2)


def _apply(function: type[torch.autograd.Function], *args: Tensor) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


def _segment_sum(
    values: Float[Tensor, "*layout"], offsets: Int[Tensor, " sequences_plus_1"]
) -> Float[Tensor, " sequences"]:
    flat = values.reshape(-1)
    num_places = flat.shape[0]
    if num_places == 0:
        return flat.new_zeros(offsets.shape[0] - 1)
    pieces, bounds = _summed_pieces(*_summed_pieces(flat, offsets))
    # What is left of the longest sequence that there could be.
    most = (num_places // _PIECE + 1) // _PIECE + 2
    steps = torch.arange(most, dtype=bounds.dtype, device=bounds.device)
    places = bounds[:-1].unsqueeze(1) + steps
    owned = places < bounds[1:].unsqueeze(1)
    return torch.where(owned, pieces[places.clamp(0, pieces.shape[0] - 1)], 0.0).sum(1)


def _summed_pieces(
    values: Float[Tensor, " places"], offsets: Int[Tensor, " sequences_plus_1"]
) -> tuple[Float[Tensor, " pieces"], Int[Tensor, " sequences_plus_1"]]:
    """Cut every sequence at the multiples of `_PIECE` places, and sum its pieces.

    Pieces are rows of one width, which a compiler sums in the kernel that computes the values.
    Sequence i has the rows from ``offsets[i] // _PIECE + i`` on, one for each block of places that
    it may touch, and these are the bounds that come back.
    """
    num_places, num_sequences = values.shape[0], offsets.shape[0] - 1

    def count_to(stop: int) -> Tensor:
        return torch.arange(stop, dtype=offsets.dtype, device=offsets.device)

    bounds = offsets // _PIECE + count_to(num_sequences + 1)
    rows = count_to(num_places // _PIECE + num_sequences)
    owners = _owners(bounds, rows)
    places = (rows - owners).unsqueeze(1) * _PIECE + count_to(_PIECE)
    owned = (places >= offsets[owners].unsqueeze(1)) & (places < offsets[owners + 1].unsqueeze(1))
    return torch.where(owned, values[places.clamp(0, num_places - 1)], 0.0).sum(1), bounds


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        values: Tensor,
        sequence_ids: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(sequence_ids)
        return _segment_sum(values, offsets)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.BackwardCFunction, grad: Tensor
    ) -> tuple[Tensor, None, None]:
        (sequence_ids,) = ctx.saved_tensors
        return grad[sequence_ids], None, None


class _SegmentSpread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        values: Tensor,
        sequence_ids: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(offsets)
        return values[sequence_ids]

    @staticmethod
    def backward(
        ctx: torch.autograd.function.BackwardCFunction, grad: Tensor
    ) -> tuple[Tensor, None, None]:
        (offsets,) = ctx.saved_tensors
        return _segment_sum(grad, offsets), None, None
