"""Which tokens belong to which sequence, for packed and for padded tensors alike.

Every function of this package that needs sequences takes one `Sequences`. Both layouts are read
as one row of tokens with boundaries, so there is one implementation of each formula:

    packed   [a a | b b b]            offsets 0 2 5
    padded   [a a .]                  offsets 0 3 6, the places `.` are outside the loss mask
             [b b b]
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Boundaries of the sequences in a layout; build it with `packed` or `padded`.

    Reads no tensor value when it is built or used, so it never waits for a device.
    A sequence must be whole in the tensors it describes: with sequence parallelism the caller
    gathers the log-probabilities of a sequence first.
    """

    sequence_ids: Int[Tensor, "*layout"]
    """int64: the sequence that each place belongs to."""

    offsets: Int[Tensor, " sequences_plus_1"]
    """int64: where each sequence begins in the flattened layout, and its length last."""

    @classmethod
    def packed(
        cls, cu_seqlens: Int[Tensor, " sequences_plus_1"], *, num_tokens: int
    ) -> "Sequences":
        """Describe tensors of shape ``[tokens]`` that hold sequences end to end.

        Args:
            cu_seqlens: where each sequence begins, and `num_tokens` last. A sequence may be
                empty.
            num_tokens: length of the row; given as a number so that nothing is read back from a
                device. It must equal the last entry of `cu_seqlens`, which is not checked here
                for the same reason.

        Raises:
            ValueError: if `cu_seqlens` is not one row with at least one entry.
        """
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(
                "Sequences.packed: expected cu_seqlens of shape (sequences + 1,), "
                f"got {tuple(cu_seqlens.shape)}"
            )
        offsets = cu_seqlens.to(torch.int64)
        places = torch.arange(num_tokens, device=offsets.device)
        return cls(
            sequence_ids=torch.searchsorted(offsets[1:].contiguous(), places, right=True),
            offsets=offsets,
        )

    @classmethod
    def padded(cls, *, batch: int, time: int, device: torch.device | None = None) -> "Sequences":
        """Describe tensors of shape ``[batch, time]``, one sequence per row.

        Padding needs no mention: it is where the loss mask is False.
        """
        rows = torch.arange(batch, device=device)
        return cls(
            sequence_ids=rows.unsqueeze(1).expand(batch, time),
            offsets=torch.arange(batch + 1, device=device) * time,
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
        """Add up the values of each sequence; an empty sequence gives 0."""
        return _apply(_SegmentSum, values, self.sequence_ids, self.offsets)

    def spread(self, values: Float[Tensor, " sequences"]) -> Float[Tensor, "*layout"]:
        """Give every place the value of its sequence."""
        return _apply(_SegmentSpread, values, self.sequence_ids, self.offsets)


# `sum` and `spread` are each other's adjoint, and saying so is worth two classes: autograd would
# turn the gradient of an indexed read into atomic additions, whose order (and last bits) change
# from run to run on a GPU, and PyTorch's own backward of segment_reduce walks each sequence in a
# single GPU thread (aten/src/ATen/native/cuda/SegmentReduce.cu).


def _apply(function: type[torch.autograd.Function], *args: Tensor) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


def _segment_sum(
    values: Float[Tensor, "*layout"], offsets: Int[Tensor, " sequences_plus_1"]
) -> Float[Tensor, " sequences"]:
    # unsafe=True skips a check of the offsets that would wait for the device.
    return torch.segment_reduce(
        values.reshape(-1), "sum", offsets=offsets, axis=0, initial=0, unsafe=True
    )


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
