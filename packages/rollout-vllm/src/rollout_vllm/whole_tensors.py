"""Puts the pieces of tensors together; lives in the engine's process. Needs torch, and no vLLM."""

from typing import final

from torch import Tensor

from rollout_vllm.copy_plan import Piece


@final
class WholeTensors:
    """Tensors that came in pieces, each in memory of its own once it is whole."""

    def __init__(self) -> None:
        self._partial: dict[str, tuple[Tensor, int]] = {}

    def add(self, piece: Piece) -> Tensor | None:
        """The tensor that this piece completes; None while rows of it are missing."""
        rows = piece.rows
        if piece.whole:
            return rows.clone()
        tensor, count = self._partial.pop(
            piece.name, (rows.new_empty((piece.num_rows, *rows.shape[1:])), 0)
        )
        tensor[piece.start : piece.start + rows.shape[0]] = rows
        count += rows.shape[0]
        if count == piece.num_rows:
            return tensor
        self._partial[piece.name] = (tensor, count)
        return None
