"""Bytes that are alive while tensors without data are computed with."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@final
class LiveBytes(TorchDispatchMode):
    """Counts the memory of what operations return, as long as anyone holds it.

    On the device ``meta`` nothing is allocated or computed, so that a step of any size is counted
    in a moment. What was there before is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes alive."""
        self.peak = 0
        """The most at any time."""
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def leave_out(self, tensors: Sequence[Tensor]) -> None:
        """Do not count the memory of these, nor of views of it."""
        for tensor in tensors:
            self._seen.add(tensor.untyped_storage())

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run the operation and count what is new in its result."""
        del types
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        num_bytes = storage.nbytes()
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, num_bytes)

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes
