"""A file that grows by whole pieces: each is on the disk, or the file ends before it."""

import os
from pathlib import Path
from typing import Self, final

from rl_metrics.atomic import sync_folder


@final
class AppendedFile:
    """One open file; made by `create` or `reopen`."""

    def __init__(self, descriptor: int, *, end: int) -> None:
        self._descriptor = descriptor
        self._end = end

    @classmethod
    def create(cls, path: Path) -> Self:
        """Start a new file.

        Raises:
            FileExistsError: if there is one.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        sync_folder(path.parent)
        return cls(descriptor, end=0)

    @classmethod
    def reopen(cls, path: Path, *, end: int) -> Self:
        """Go on after the first `end` bytes of a file; the rest is cut off."""
        descriptor = os.open(path, os.O_RDWR)
        os.ftruncate(descriptor, end)
        os.lseek(descriptor, end, os.SEEK_SET)
        os.fsync(descriptor)
        return cls(descriptor, end=end)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._descriptor < 0

    def append(self, piece: bytes) -> None:
        """Write a piece and wait until the disk has it.

        Raises:
            OSError: if the disk refuses; the file then ends as before.
        """
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError:
            # half a piece would swallow the next one
            os.ftruncate(self._descriptor, self._end)
            os.lseek(self._descriptor, self._end, os.SEEK_SET)
            raise
        self._end += len(piece)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
