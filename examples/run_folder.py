"""The folder that a run leaves behind, and finding it again.

runs/NAME-DATE/  effective_config.toml   every value, who set it, which package reads it
                 environments.json       the variables that each worker process saw
                 metrics.jsonl           one line per optimizer step
                 completions.json        answers before and after
                 checkpoints/            the newest one, complete
                 model/                  the trained model, a Hugging Face folder
                 plot.png, report.html   to look at
"""

import time
from dataclasses import dataclass
from pathlib import Path

from async_policy import CheckpointStore

CONFIG_NAME = "effective_config.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The effective configuration, which a resumed run reads."""
        return self.path / CONFIG_NAME

    @property
    def store(self) -> CheckpointStore:
        """The run's checkpoints: one is kept, and goes when the next is complete."""
        return CheckpointStore(self.path / "checkpoints", keep=1)

    @classmethod
    def create(cls, parent: Path, name: str) -> "RunFolder":
        """A folder named after the job and the time; never one that exists."""
        stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        attempt = 1
        while True:
            path = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                attempt += 1
            else:
                return cls(path=path)

    @classmethod
    def find(cls, wanted: Path | None, *, parent: Path) -> "RunFolder":
        """An existing run folder: the given one, or the latest below `parent`.

        Raises:
            ValueError: if there is none.
        """
        if wanted is not None:
            if not (wanted / CONFIG_NAME).is_file():
                raise ValueError(
                    f"--resume: expected a run folder, which holds {CONFIG_NAME}; got {wanted}"
                )
            return cls(path=wanted)
        found = sorted(parent.glob(f"*/{CONFIG_NAME}"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise ValueError(f"--resume: expected a run below {parent}/, found none")
        return cls(path=found[-1].parent)

    def how_to_resume(self) -> str:
        """One line for the terminal."""
        latest = self.store.latest()
        state = f"its checkpoint of step {latest.step}" if latest else "step 0: no checkpoint yet"
        return f"to go on from {state}: --resume {self.path}"
