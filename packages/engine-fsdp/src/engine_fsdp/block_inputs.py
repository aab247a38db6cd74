"""Inputs of checkpointed blocks, which wait for the backward pass in the host's memory.

::

    forward     block i computes ── its input goes to the host
    backward    block i computes ── the input of block i - 1 comes back

A device copies on a stream of its own, beside the computation, and the host waits for neither: the
stream that computes waits for a copy where it needs the result, or the memory. On the device are at
most the input that a block computes with and the one that is on its way.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True, eq=False)
class _Kept:
    """An input in the host's memory."""

    host: Tensor
    """Its copy, in a buffer that is used again once this object is gone."""

    device: torch.device
    """Where it is from."""

    before: "weakref.ref[_Kept] | None"
    """What was kept last before it, and is asked for next if it is of the same forward pass."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _OnItsWay:
    """A copy that is running, in either direction."""

    kept: "weakref.ref[_Kept]"

    tensor: Tensor
    """On the device; not given back before the copy is done with it."""

    done: Any
    """The event after it; None where the copy is there when the call returns."""


@final
class InputsOnHost:
    """Takes the inputs of blocks away after they were used, and brings them back in time.

    Of pinned memory it holds as many buffers as blocks were kept at once, of the size of the
    largest input, for as long as it lives: pinning is slow.
    """

    def __init__(self) -> None:
        self._leaving: _OnItsWay | None = None
        self._coming: _OnItsWay | None = None
        self._last: weakref.ref[_Kept] | None = None
        self._buffers: list[Tensor] = []
        self._stream: Any = None

    def wrap(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same function, whose first argument waits in the host's memory if autograd keeps it.

        What else autograd keeps of the function stays where it is.
        """

        def with_input_on_host(hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
            place, num_kept = hidden.data_ptr(), 0

            def pack(tensor: Tensor) -> "_Kept | Tensor":
                nonlocal num_kept
                if tensor.data_ptr() != place:
                    return tensor
                num_kept += 1
                return self._keep(tensor.detach())

            with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
                output = forward(hidden, *args, **kwargs)
            if output.requires_grad and not num_kept:
                message = (
                    "offload_activations = True, but the block's input is not among what autograd "
                    f"keeps of it, in torch {torch.__version__}; set offload_activations = False"
                )
                raise RuntimeError(message)
            return output

        return with_input_on_host

    def settle(self) -> None:
        """Give back the device's memory of all copies, once they are done."""
        for copy in (self._leaving, self._coming):
            if copy is not None and copy.done is not None:
                _wait(copy)
        self._leaving = self._coming = None

    def _keep(self, tensor: Tensor) -> _Kept:
        self.settle()  # what left before has had the time of a block
        buffer = self._buffer(tensor)
        host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        kept = _Kept(host=host, device=tensor.device, before=self._last)
        weakref.finalize(kept, self._buffers.append, buffer)
        self._last = weakref.ref(kept)
        self._leaving = self._copy(kept, tensor, to_host=True)
        return kept

    def _unpack(self, kept: "_Kept | Tensor") -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        under_way = (copy for copy in (self._leaving, self._coming) if copy is not None)
        copy = next((copy for copy in under_way if copy.kept() is kept), None) or self._fetch(kept)
        if copy.done is not None:
            _wait(copy)
        self.settle()
        before = None if kept.before is None else kept.before()
        if before is not None:
            self._coming = self._fetch(before)
        return copy.tensor

    def _fetch(self, kept: _Kept) -> _OnItsWay:
        tensor = torch.empty_like(kept.host, device=kept.device)
        return self._copy(kept, tensor, to_host=False)

    def _copy(self, kept: _Kept, tensor: Tensor, *, to_host: bool) -> _OnItsWay:
        """Begin to copy. All copies are on one stream, so that they use a buffer in turn."""
        source, target = (tensor, kept.host) if to_host else (kept.host, tensor)
        done = None
        if tensor.device.type == "cpu":
            target.copy_(source)
        else:
            with self._beside(tensor.device):
                target.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        return _OnItsWay(kept=weakref.ref(kept), tensor=tensor, done=done)

    def _beside(self, device: torch.device) -> AbstractContextManager[None]:
        """The stream of copies, which begins after what is queued on the one that computes.

        That one has written what is to be read, and done with the memory that is written to.
        """
        module = _module(device)
        if self._stream is None:
            self._stream = module.Stream(device)
        self._stream.wait_stream(module.current_stream(device))
        context: AbstractContextManager[None] = module.stream(self._stream)
        return context

    def _buffer(self, tensor: Tensor) -> Tensor:
        """Host memory that nobody uses; one that is too small is given back."""
        while self._buffers:
            buffer = self._buffers.pop()
            if buffer.nbytes >= tensor.nbytes:
                return buffer
        pinned = tensor.device.type != "cpu"
        return torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=pinned)


def _wait(copy: _OnItsWay) -> None:
    """Let the stream that computes go on after the copy."""
    _module(copy.tensor.device).current_stream(copy.tensor.device).wait_event(copy.done)


def _module(device: torch.device) -> Any:  # noqa: ANN401  # torch.cuda, or another such module
    return torch.get_device_module(device)
