"""A folder that all ranks of torch.distributed write into, and that appears by one rename."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import final

import torch.distributed as dist

from rl_contracts.all_ranks import from_all_ranks


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` for all ranks to write into; renamed to it when all are done.

    Entered and left on every rank. If any rank fails, all of them raise and `folder` does not
    appear. A rank that fails must first have met the others in every collective that they enter
    before they leave.

    Raises:
        FileExistsError: if `folder` exists.
        RuntimeError: if another rank failed; holds its error.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    with _Together():
        if folder.exists():
            message = f"{folder}: expected a new folder, but it exists; give another name"
            raise FileExistsError(message)
    with _Together():
        if dist.get_rank() == 0:
            if unfinished.exists():
                shutil.rmtree(unfinished)  # what a killed run left
            unfinished.mkdir(parents=True)
    with _Together():
        yield unfinished
    with _Together():
        if dist.get_rank() == 0:
            unfinished.rename(folder)


@final
class _Together:
    """Ends on all ranks at once, with an error on all of them if there is one on any."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell the other ranks; the own error goes on its way."""
        texts = from_all_ranks(None if kind is None else f"{kind.__name__}: {error}")
        if error is not None:
            return
        for rank, text in enumerate(texts):
            if text is not None:
                message = f"rank {rank} failed: {text}"
                raise RuntimeError(message)
