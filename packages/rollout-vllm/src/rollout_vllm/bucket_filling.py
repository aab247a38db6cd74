"""Packs tensors into the two halves of a bucket, and hands each half over when it is full."""

import time
from array import array
from typing import final

import torch
from torch import Tensor

from rollout_vllm.carriers import Carrier

ALIGNMENT = 256
"""Bytes; where a tensor in a bucket may begin."""

# tensors wait for their copy into the bucket until this much has come together
_BATCH_BYTES = 64 * 2**20


@final
class BucketFilling:
    """Fills the halves of a bucket in turn."""

    def __init__(self, carrier: Carrier) -> None:
        memory = carrier.memory
        half_bytes = memory.numel() // 2
        self._halves = (memory[:half_bytes], memory[half_bytes:])
        self._carrier = carrier
        self._half = 0
        self._used = 0
        self._layout = array("q")
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._batched_bytes = 0
        self.num_bytes = 0
        self.num_buckets = 0
        self.waited_s = 0.0

    def add(self, number: int, tensor: Tensor, dtype: torch.dtype) -> None:
        """Put a tensor into the bucket: as a whole, or its rows into this half and the next."""
        rows = tensor if tensor.ndim else tensor[None]
        row_bytes = rows[0].numel() * dtype.itemsize if rows.shape[0] else 0
        begin = 0
        while begin < rows.shape[0]:
            half = self._halves[self._half]
            left = rows.shape[0] - begin
            fitting = (half.numel() - self._used) // max(row_bytes, 1)
            # cut a tensor only where it must be: whole ones load faster
            whole_later = rows.shape[0] * row_bytes <= half.numel()
            if fitting < left and self._used and (whole_later or not fitting):
                self._hand_over()
                continue
            count = min(left, fitting)
            part = rows[begin : begin + count]
            num_bytes = count * row_bytes
            place = half[self._used : self._used + num_bytes]
            self._targets.append(place.view(dtype).view(part.shape))
            self._sources.append(part)
            self._layout.extend((number, self._used, begin, count))
            self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            self._batched_bytes += num_bytes
            self.num_bytes += num_bytes
            begin += count
            if self._batched_bytes >= _BATCH_BYTES:
                self._copy()

    def finish(self) -> None:
        """Hand over what is left, and wait until all of it has been taken."""
        if self._layout:
            self._hand_over()
        self._carrier.end()
        self._wait(0)
        self._wait(1)

    def _copy(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        self._targets, self._sources, self._batched_bytes = [], [], 0

    def _hand_over(self) -> None:
        self._copy()
        self._carrier.hand_over(self._half, self._used, self._layout)
        self.num_buckets += 1
        self._half, self._used, self._layout = 1 - self._half, 0, array("q")
        self._wait(self._half)

    def _wait(self, half: int) -> None:
        begin = time.perf_counter()
        self._carrier.wait(half)
        self.waited_s += time.perf_counter() - begin
