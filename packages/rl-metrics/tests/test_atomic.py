"""Atomic files."""

import os
from pathlib import Path

import pytest

from rl_metrics.atomic import write_atomically


def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt before the rename leaves the old content and no temporary file."""
    path = tmp_path / "report.html"
    write_atomically(path, b"old")

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_a_file_can_be_read_by_others(tmp_path: Path) -> None:
    """A report is not private to the one who ran the job."""
    path = tmp_path / "report.html"
    write_atomically(path, b"content")
    assert path.stat().st_mode & 0o777 == 0o644
