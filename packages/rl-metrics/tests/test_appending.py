"""Files that grow by whole pieces."""

import os
from pathlib import Path

import pytest

from rl_metrics.appending import AppendedFile


def test_a_refused_piece_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes half a piece and then no more: the file ends before it, and goes on."""
    file = AppendedFile.create(tmp_path / "a")
    file.append(b"first\n")
    write, calls = os.write, 0

    def half(descriptor: int, piece: memoryview) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(28, "No space left on device")
        return write(descriptor, piece[: len(piece) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space left"):
            file.append(b"second\n")
    assert (tmp_path / "a").read_bytes() == b"first\n"
    file.append(b"third\n")
    file.close()
    file.close()
    assert file.is_closed
    assert (tmp_path / "a").read_bytes() == b"first\nthird\n"


def test_a_file_goes_on_after_its_first_bytes(tmp_path: Path) -> None:
    """What came after them is cut off; a file that exists is not begun anew."""
    path = tmp_path / "a"
    path.write_bytes(b"first\nsec")
    file = AppendedFile.reopen(path, end=6)
    file.append(b"other\n")
    file.close()
    assert path.read_bytes() == b"first\nother\n"
    with pytest.raises(FileExistsError):
        AppendedFile.create(path)
