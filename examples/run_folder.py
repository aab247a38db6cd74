"""The folder that a run leaves behind, and finding it again.

runs/NAME-DATE/  effective_config.toml   every value, who set it, which package reads it
                 environments.json       the variables that each worker process saw
                 metrics.jsonl           one line per optimizer step
                 completions.json        answers before and after
                     identity.json           data and model, which a resumed run must have too
                     logs/                   what every process printed
                 checkpoints/            the newest one, complete, and the best where it is kept
                 model/                  the trained model, a Hugging Face folder
                 plot.png, report.html   to look at
"""

import contextlib
import fcntl
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from async_policy import CheckpointStore, JsonValue, KeepBest, read_json, write_json

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
        """The run's checkpoints: one is kept, and goes when the next is complete.

        The best of those that were given a held-out reward stays beside it.
        """
        best = KeepBest(metric="reward/heldout/mean", better="higher")
        return CheckpointStore(self.path / "checkpoints", keep=1, keep_best=best)

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
    def find(cls, wanted: Path | None, *, parent: Path, name: str) -> "RunFolder":
        """An existing run folder: the given one, or the latest of this job below `parent`.

        Raises:
            ValueError: if there is none.
        """
        if wanted is not None:
            if not (wanted / CONFIG_NAME).is_file():
                raise ValueError(
                    f"--resume: expected a run folder, which holds {CONFIG_NAME}; got {wanted}"
                )
            return cls(path=wanted)
        found = sorted(
            parent.glob(f"{name}-*/{CONFIG_NAME}"), key=lambda path: path.stat().st_mtime
        )
        if not found:
            raise ValueError(
                f"--resume: expected a run {parent}/{name}-..., found none; give the folder of a "
                "run that lies elsewhere: --resume FOLDER"
            )
        return cls(path=found[-1].parent)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from running in this folder at the same time.

        Raises:
            ValueError: if one does.
        """
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"{self.path}: another process is running in it") from error
            yield

    def write_config(self, text: str) -> None:
        """Write the effective configuration; a kill leaves the one before."""
        unfinished = self.config.with_suffix(".unfinished")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.rename(self.config)

    def check_identity(self, identity: dict[str, JsonValue]) -> None:
        """Refuse to go on with other data or another model than the run began with.

        Raises:
            ValueError: naming what differs, with both values.
        """
        path = self.path / "identity.json"
        if not path.exists():
            write_json(path, identity)
            return
        before = read_json(path)
        assert isinstance(before, dict)  # noqa: S101  # written above
        differing = [
            f"{key} was {before.get(key)!r} and is {value!r} now"
            for key, value in identity.items()
            if before.get(key) != value
        ]
        if differing:
            raise ValueError(
                f"{self.path} cannot go on as another run: {'; '.join(differing)}; "
                "begin a new run, or leave these settings as they were"
            )

    def resume_command(self, *more: str) -> str:
        """The command that goes on with this run."""
        return " ".join(("./run", sys.argv[0], "--resume", str(self.path), *more))

    def how_to_resume(self) -> str:
        """One line for the terminal."""
        latest = self.store.latest()
        state = f"the checkpoint of step {latest.step}" if latest else "step 0: no checkpoint yet"
        return f"to go on from {state}:  {self.resume_command()}"
