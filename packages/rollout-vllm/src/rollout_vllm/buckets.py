"""Memory that two processes share, for weights on their way.

::

    GPU     the sender's memory, opened by the receiver with CUDA's inter-process handle
    CPU     a file in /dev/shm, mapped by both, without a name once both have it

On a GPU a handle is bytes and numbers, sent as such: torch's own way (`reduce_tensor`) pickles it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

_CUDA_HANDLE = (
    # `UntypedStorage._share_cuda_` and `_new_shared_cuda`, torch/csrc/StorageSharing.cpp, torch
    # 2.10 to 2.14
    "device",
    "handle",
    "num_bytes",
    "offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)


def make_shared(num_bytes: int, device: torch.device, folder: Path) -> Tensor:
    """Bytes that another process can open."""
    if device.type == "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    path = folder / "buckets"
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def forget_name(folder: Path) -> None:
    """Remove the name of host memory that every receiver has opened: it then ends with them."""
    (folder / "buckets").unlink(missing_ok=True)


def handle_of(memory: Tensor, folder: Path) -> dict[str, object]:
    """What `open_shared` needs to know, as plain values."""
    if memory.device.type != "cuda":
        return {"path": str(folder / "buckets"), "num_bytes": memory.numel()}
    values = memory.untyped_storage()._share_cuda_()
    return {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in zip(_CUDA_HANDLE, values, strict=True)
    }


def open_shared(handle: Mapping[str, object], device: torch.device) -> Tensor:
    """The other process's bytes.

    Raises:
        RuntimeError: if the memory is gone or lies on another device.
    """
    if device.type != "cuda":
        num_bytes = int(cast("int", handle["num_bytes"]))
        path = str(handle["path"])
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    torch.cuda._lazy_init()  # noqa: SLF001  (as `rebuild_cuda_tensor` does)
    values = [
        bytes.fromhex(value) if isinstance(value, str) else value
        for value in (handle[name] for name in _CUDA_HANDLE)
    ]
    # devices may be numbered differently in the two processes
    values[0] = device.index or 0
    storage = torch.UntypedStorage._new_shared_cuda(*values)  # noqa: SLF001
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def device_name(device: torch.device) -> str:
    """The same for two processes on one device, however they number it."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_properties(device).uuid}"
    return device.type


def synchronise(device: torch.device) -> None:
    """Wait for what was enqueued on a GPU's present stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def checksum(memory: Tensor) -> int:
    """Sums over all bytes that depend on their places; the same on every device.

    Args:
        memory: bytes, at an address that is divisible by 8.
    """
    whole = memory.numel() // 8 * 8
    words = memory[:whole].view(torch.int64)
    rest = memory[whole:].to(torch.int64)
    total = 0
    piece = 2**20
    for number, begin in enumerate(range(0, words.numel(), piece), start=1):
        part = words[begin : begin + piece]
        weights = torch.arange(1, part.numel() + 1, device=part.device)
        total += number * int((part * weights).sum()) + int(part.sum())
    total += int((rest * torch.arange(1, rest.numel() + 1, device=rest.device)).sum())
    return total % 2**63
