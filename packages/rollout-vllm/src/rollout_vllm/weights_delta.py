"""What changed between two publications of files, for a machine that has the earlier one.

::

    trainer's machine                       network                  sampler's machine
    v7, v8 ── publish_changes ── PublishedChanges, small files ──▶ v7 ── apply_changes ──▶ v8

Lossless: what comes out are the files of the later publication, byte for byte, and their checksums
are compared. After one step with a small learning rate most weights in bfloat16 are the same bits
as before; a file of which a third or more changed is sent as it is.

Needs torch, and no vLLM.
"""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import attrs
import torch
from torch import Tensor

from rl_contracts.rollout import PolicyVersion
from rollout_vllm.config import Dtype
from rollout_vllm.weights_sender import PublishedFile, PublishedWeights, file_checksum

# a change is a place of 4 bytes and a value
_WORDS: dict[Dtype, torch.dtype] = {
    "bfloat16": torch.int16,
    "float16": torch.int16,
    "float32": torch.int32,
}
_PLACE_BYTES = 4


@attrs.frozen(kw_only=True)
class ChangedFile:
    """How one file of the later publication comes out of the earlier one."""

    kind: Literal["same", "changes", "whole"]
    """Nothing is sent, places and values are, or the file itself is."""

    sent: PublishedFile | None
    """The file that is sent, if one is."""

    before_crc32: int
    """Checksum of the earlier file; 0 if it is not needed."""

    after: PublishedFile
    """The later file."""


@attrs.frozen(kw_only=True)
class PublishedChanges:
    """Changes from one version of the weights to another; small and picklable."""

    before: PolicyVersion
    """Version that the receiving side must have."""

    version: PolicyVersion
    """Version that comes out."""

    folder: Path
    """Folder that holds the files that are sent."""

    dtype: Dtype
    """Type of floating-point weights."""

    files: tuple[ChangedFile, ...]
    """All files of the later publication."""

    @property
    def num_bytes(self) -> int:
        """Size of what is sent, in bytes."""
        return sum(file.sent.num_bytes for file in self.files if file.sent is not None)


def publish_changes(
    before: PublishedWeights, after: PublishedWeights, *, folder: Path
) -> PublishedChanges:
    """Write what changed from one publication to a later one.

    Args:
        before: what the receiving side has.
        after: what it shall have.
        folder: where the changes go; made if it is not there.

    Raises:
        ValueError: if the two are of different types, or a file is not what was written.
    """
    if before.dtype != after.dtype:
        raise ValueError(
            f"publish_changes: expected two publications of one type, got version "
            f"{before.version} in {before.dtype} and {after.version} in {after.dtype}"
        )
    before.tensors()
    after.tensors()
    earlier = {file.name: file for file in before.files}
    name = f"v{before.version}-v{after.version}-{uuid.uuid4().hex[:8]}"
    with _new_folder(folder / name) as unfinished:
        files = tuple(
            _written(unfinished, before, earlier.get(file.name), after, file)
            for file in after.files
        )
    return PublishedChanges(
        before=before.version,
        version=after.version,
        folder=folder / name,
        dtype=after.dtype,
        files=files,
    )


def apply_changes(
    before: PublishedWeights, changes: PublishedChanges, *, folder: Path
) -> PublishedWeights:
    """Make the later publication out of the earlier one and what changed.

    Args:
        before: the publication that the changes are based on; left as it is.
        changes: what `publish_changes` wrote, in a folder that this machine sees.
        folder: where the later publication goes; made if it is not there.

    Raises:
        ValueError: if `before` is not what the changes are based on, or a file is not what was
            written; nothing is left behind.
    """
    if before.version != changes.before:
        raise ValueError(
            f"apply_changes: expected version {changes.before}, on which the changes to version "
            f"{changes.version} are based, got {before.version}"
        )
    name = f"v{changes.version}-{uuid.uuid4().hex[:8]}"
    with _new_folder(folder / name) as unfinished:
        for file in changes.files:
            _made(unfinished / file.after.name, before.folder / file.after.name, changes, file)
    return PublishedWeights(
        version=changes.version,
        folder=folder / name,
        dtype=changes.dtype,
        files=tuple(file.after for file in changes.files),
    )


@contextmanager
def _new_folder(finished: Path) -> Iterator[Path]:
    """A folder that gets its name when it is complete, and does not stay if it is not."""
    unfinished = finished.with_name(f"{finished.name}.part")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(finished)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def _words(path: Path, dtype: torch.dtype) -> Tensor:
    """A file in words, the last one filled up with zeros."""
    content = bytearray(path.read_bytes())
    content += bytes(-len(content) % dtype.itemsize)
    return torch.frombuffer(content, dtype=dtype)


def _written(
    folder: Path,
    before: PublishedWeights,
    earlier: PublishedFile | None,
    after: PublishedWeights,
    later: PublishedFile,
) -> ChangedFile:
    path = folder / later.name
    if earlier is not None and earlier.num_bytes == later.num_bytes:
        word = _WORDS[after.dtype]
        new = _words(after.folder / later.name, word)
        places = (new != _words(before.folder / later.name, word)).nonzero()[:, 0]
        if not len(places):
            return ChangedFile(kind="same", sent=None, before_crc32=earlier.crc32, after=later)
        if len(places) * (_PLACE_BYTES + word.itemsize) < later.num_bytes:
            # both little-endian, as safetensors is
            content = places.to(torch.int32).numpy().tobytes() + new[places].numpy().tobytes()
            path.write_bytes(content)
            return ChangedFile(
                kind="changes", sent=_described(path), before_crc32=earlier.crc32, after=later
            )
    shutil.copyfile(after.folder / later.name, path)
    return ChangedFile(kind="whole", sent=_described(path), before_crc32=0, after=later)


def _made(path: Path, earlier: Path, changes: PublishedChanges, file: ChangedFile) -> None:
    where = f"changes from version {changes.before} to {changes.version}"
    if file.kind != "whole" and file_checksum(earlier) != file.before_crc32:
        raise ValueError(f"{where}: {earlier} is not the file that they are based on")
    if file.sent is not None:
        sent = changes.folder / file.sent.name
        if not sent.is_file() or _described(sent) != file.sent:
            raise ValueError(f"{where}: {sent} is not there, or changed since it was written")
    if file.kind == "same":
        shutil.copyfile(earlier, path)
    elif file.kind == "whole":
        shutil.copyfile(changes.folder / file.after.name, path)
    else:
        word = _WORDS[changes.dtype]
        content = bytearray((changes.folder / file.after.name).read_bytes())
        count = len(content) // (_PLACE_BYTES + word.itemsize)
        places = torch.frombuffer(content, dtype=torch.int32, count=count)
        values = torch.frombuffer(content, dtype=word, offset=count * _PLACE_BYTES)
        words = _words(earlier, word)
        words[places.long()] = values
        path.write_bytes(words.numpy().tobytes()[: file.after.num_bytes])
    if _described(path) != file.after:
        raise ValueError(f"{where}: {path.name} did not come out as it was published")


def _described(path: Path) -> PublishedFile:
    return PublishedFile(name=path.name, num_bytes=path.stat().st_size, crc32=file_checksum(path))
