"""JSON files: the old one or the new one."""

import os
from pathlib import Path

import pytest

from async_policy import CheckpointError, read_json, write_json


def test_round_trip(tmp_path: Path) -> None:
    """What was written comes back, tuples as lists."""
    path = tmp_path / "state.json"
    write_json(path, {"version": 3, "order": {"epoch": 1, "left": (4, 2)}, "note": None})
    assert read_json(path) == {"version": 3, "order": {"epoch": 1, "left": [4, 2]}, "note": None}


def test_value_that_is_not_json_leaves_the_old_file(tmp_path: Path) -> None:
    """A NaN is refused before anything is touched."""
    path = tmp_path / "state.json"
    write_json(path, 1)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, float("nan"))
    assert read_json(path) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails at fsync leaves the old file, and no temporary one."""
    path = tmp_path / "state.json"
    write_json(path, "old")

    def fail(_descriptor: int) -> None:
        message = "No space left on device"
        raise OSError(message)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, "new")
    assert read_json(path) == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_broken_file_is_named_with_the_place(tmp_path: Path) -> None:
    """An edited file says which file and where."""
    path = tmp_path / "state.json"
    path.write_text('{"version": }')
    with pytest.raises(CheckpointError, match=r"JSON in .*state\.json, got .* line 1, column 13"):
        read_json(path)
