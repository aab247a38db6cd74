"""Small state as JSON files that are either the old one or the new one, never half of each."""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from async_policy.errors import CheckpointError

JsonValue = None | bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"]
"""What a JSON file can hold. Tuples come back as lists."""


def fsync_path(path: Path) -> None:
    """Make a file's content, or a folder's list of names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: JsonValue) -> None:
    """Replace `path` by `value` as JSON, in one rename.

    The text is complete and on the disk under a temporary name in the same folder before it takes
    the place of what was there. A full disk or a kill leaves the old file.

    Raises:
        ValueError: if `value` holds a NaN or an infinity, which JSON does not have.
        TypeError: if `value` holds something that is not JSON.
    """
    text = json.dumps(value, allow_nan=False, indent=1)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        fsync_path(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def read_json(path: Path) -> JsonValue:
    """What `write_json` wrote.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if it is not JSON; the message holds the place.
    """
    text = path.read_text(encoding="utf-8")
    try:
        value: JsonValue = json.loads(text)
    except json.JSONDecodeError as error:
        message = (
            f"read_json: expected JSON in {path}, got {error.msg} at line {error.lineno}, "
            f"column {error.colno}; the file was not written by write_json, or was edited"
        )
        raise CheckpointError(message) from error
    return value
