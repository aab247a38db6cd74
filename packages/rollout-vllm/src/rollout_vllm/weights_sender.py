"""The sending half of weight transfer by files; needs torch, and no vLLM.

::

    trainer                          shared memory, or a disk            engine process
    publish_weights ── cast, write ──▶ <folder>/v7-1f3a.part/
                    ── rename ───────▶ <folder>/v7-1f3a/00000.safetensors ── load ──▶ model
                    └─ PublishedWeights (a few hundred bytes) ─▶ VllmSampler.load_published

A reader never sees a half-written folder: it gets its name when it is complete.
"""

import shutil
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import attrs

from rl_contracts.rollout import PolicyVersion
from rollout_vllm.config import Dtype
from rollout_vllm.headers import TensorHeader, read_headers

_CHUNK_BYTES = 16 * 2**20
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")


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
    """Where one version of the weights lies; small and picklable.

    A `rollout_vllm.publication.Publication`.
    """

    version: PolicyVersion
    """Optimizer steps behind these weights."""

    folder: Path
    """Folder that holds the files: in shared memory, or on a disk that the sampler sees too."""

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

    def tensors(self) -> dict[str, TensorHeader]:
        """Names and shapes of all weights.

        Raises:
            ValueError: if a file is not there, or is not what was written.
        """
        for file in self.files:
            self._check_file(file)
        return read_headers(self.paths())

    def different_heads(self, tied_head: str) -> list[str]:
        """Names of the embeddings to which a tied head that was sent too is not equal."""
        import torch  # noqa: PLC0415  (heavy; only here)
        from safetensors import safe_open  # noqa: PLC0415

        found: dict[str, torch.Tensor] = {}
        for path in self.paths():
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    if name == tied_head or name.endswith(_EMBEDDINGS):
                        found[name] = file.get_tensor(name)
        head = found.pop(tied_head)
        return [name for name, embedding in found.items() if not torch.equal(head, embedding)]

    def instructions(self) -> Mapping[str, object]:
        """What the receiving half needs to know."""
        return {"transport": "files", "paths": [str(path) for path in self.paths()]}

    def refuse(self, reason: str) -> None:
        """Nobody waits: the files stay."""

    def remove(self) -> None:
        """Free the memory or the disk. Removing twice is allowed."""
        shutil.rmtree(self.folder, ignore_errors=not self.folder.exists())

    def _check_file(self, file: PublishedFile) -> None:
        where, path = f"weights of version {self.version}", self.folder / file.name
        if not path.is_file():
            message = (
                f"{where}: {path} is not there; a publication is removed once it is loaded "
                "(give keep=True if several samplers load it)"
            )
            raise ValueError(message)
        found = (path.stat().st_size, file_checksum(path))
        if found != (file.num_bytes, file.crc32):
            message = (
                f"{where}: {path} changed since it was written: expected {file.num_bytes} bytes "
                f"with checksum {file.crc32:08x}, got {found[0]} with {found[1]:08x}"
            )
            raise ValueError(message)


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
        folder: where publications go, best under ``/dev/shm``, or on a disk that the sampler's
            machine sees too; made if it is not there. It stays the caller's: remove it when the
            run ends.
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
