"""Files that are either the old one or the new one, never half of each."""

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Put `content` at `path` by one rename, after it has reached the disk.

    A kill or a full disk leaves what was there before. The parent folder must exist.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            # mkstemp makes files that only their owner reads; a report is for others too
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)  # noqa: PTH105 - Path.replace returns a Path nobody needs
    except BaseException:
        # a KeyboardInterrupt must not leave the temporary file behind either
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a new or renamed entry of `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
