"""The sending half of the shared-memory weight transfer; needs torch, and no vLLM.

::

    trainer                          shared memory                       engine process
    publish_weights ── cast, write ──▶ <folder>/v7-1f3a.part/
                    ── rename ───────▶ <folder>/v7-1f3a/00000.safetensors ── load ──▶ model
                    └─ PublishedWeights (a few hundred bytes) ─▶ VllmSampler.load_published

A reader never sees a half-written folder: it gets its name when it is complete.
"""

import shutil
import uuid
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import attrs

from rl_contracts.rollout import PolicyVersion
from rollout_vllm.config import Dtype

_CHUNK_BYTES = 16 * 2**20


class TensorLike(Protocol):
    """A `torch.Tensor`, named without importing torch; anything else is refused when published."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each dimension."""


@attrs.frozen(kw_only=True)
class PublishedFile:
    """One safetensors file of a publication."""

    name: str
    """File name inside the publication's folder."""

    num_bytes: int
    """Size of the file, in bytes."""

    crc32: int
    """Checksum of the whole file."""


@attrs.frozen(kw_only=True)
class PublishedWeights:
    """Where one version of the weights lies; small and picklable."""

    version: PolicyVersion
    """Optimizer steps behind these weights."""

    folder: Path
    """Folder that holds the files, on this machine."""

    dtype: Dtype
    """Type that floating-point weights were cast to."""

    files: tuple[PublishedFile, ...]
    """The files, each tensor in exactly one of them."""

    @property
    def num_bytes(self) -> int:
        """Size of all files, in bytes."""
        return sum(file.num_bytes for file in self.files)

    def paths(self) -> tuple[Path, ...]:
        """Full paths of the files."""
        return tuple(self.folder / file.name for file in self.files)

    def remove(self) -> None:
        """Free the shared memory. Removing twice is allowed."""
        shutil.rmtree(self.folder, ignore_errors=not self.folder.exists())


def publish_weights(
    weights: Iterable[tuple[str, TensorLike]],
    *,
    version: PolicyVersion,
    folder: Path,
    dtype: Dtype,
    bucket_bytes: int = 2**30,
) -> PublishedWeights:
    """Write weights for a sampler on the same machine to load.

    Args:
        weights: names of the checkpoint and whole tensors; read once, on every rank that runs
            the iterator, so only one rank should publish what it yields.
        version: optimizer steps behind the weights.
        folder: where publications go, best under ``/dev/shm``; made if it is not there. It stays
            the caller's: remove it when the run ends.
        dtype: the sampler's type; floating-point weights are cast to it.
        bucket_bytes: a file is closed when it has reached this size, which bounds the memory
            that is needed beside the files.

    Raises:
        TypeError: if something is not a `torch.Tensor`.
        ValueError: if a name comes twice or the version is below 0.
    """
    if version < 0:
        raise ValueError(f"publish_weights: expected a version of 0 or more, got {version}")
    name = f"v{version}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{name}.part"
    unfinished.mkdir()
    try:
        files = tuple(_write_buckets(weights, unfinished, dtype, bucket_bytes))
        finished = unfinished.rename(folder / name)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
    return PublishedWeights(version=version, folder=finished, dtype=dtype, files=files)


def _write_buckets(
    weights: Iterable[tuple[str, TensorLike]], folder: Path, dtype: Dtype, bucket_bytes: int
) -> Iterator[PublishedFile]:
    import torch  # noqa: PLC0415  (heavy, and a sampler's config needs none of it)
    from safetensors.torch import save_file  # noqa: PLC0415

    target = {
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
    }[dtype]

    def write(bucket: dict[str, torch.Tensor], number: int) -> PublishedFile:
        path = folder / f"{number:05d}.safetensors"
        save_file(bucket, path)
        return PublishedFile(
            name=path.name, num_bytes=path.stat().st_size, crc32=file_checksum(path)
        )

    names: set[str] = set()
    storages: set[int] = set()
    bucket: dict[str, torch.Tensor] = {}
    num_bytes = number = 0
    for name, tensor in weights:
        if not isinstance(tensor, torch.Tensor):
            message = f"publish_weights: {name!r}: expected a torch.Tensor, got {type(tensor)}"
            raise TypeError(message)
        if name in names:
            raise ValueError(f"publish_weights: {name!r} came twice")
        names.add(name)
        sent = tensor.detach().to(
            device="cpu", dtype=target if tensor.is_floating_point() else tensor.dtype
        )
        storage = sent.untyped_storage().data_ptr()
        # safetensors takes no strides and no two tensors of one storage (tied weights, views)
        if storage in storages or not sent.is_contiguous():
            sent = sent.clone(memory_format=torch.contiguous_format)
            storage = sent.untyped_storage().data_ptr()
        storages.add(storage)
        bucket[name] = sent
        num_bytes += sent.numel() * sent.element_size()
        if num_bytes >= bucket_bytes:
            yield write(bucket, number)
            bucket, num_bytes, number = {}, 0, number + 1
            storages.clear()
    if bucket:
        yield write(bucket, number)


def file_checksum(path: Path) -> int:
    """CRC-32 of a file, read in pieces."""
    checksum = 0
    with path.open("rb") as stream:
        while piece := stream.read(_CHUNK_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return checksum
