"""Models that are made once on a machine and kept in the user's cache folder."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_root() -> Path:
    """The user's cache folder of these examples."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl-workspace"


def made_once(target: Path, fill: Callable[[Path], None]) -> Path:
    """A folder in the cache; `fill` makes its contents if it is not there yet.

    Filled beside its place and moved there whole, so that a killed process leaves nothing that
    looks finished.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        fill(work)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():  # not just another process that was faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target
