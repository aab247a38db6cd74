"""Run functions of a file on N gloo ranks: `python launch.py N FOLDER FILE FUNCTION...`.

Torch is imported once and the ranks are forked from here, so eight ranks start as fast as two.
What the functions return on rank r is written to FOLDER/r.json, by their names. The first rank
that fails ends all others.
"""

import json
import multiprocessing
import runpy
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist
import torch.distributed.fsdp  # noqa: F401  # slow to import: here, once for all ranks


def _rank(
    functions: dict[str, Callable[[], object]], rank: int, world_size: int, folder: Path
) -> None:
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    (folder / f"{rank}.json").write_text(
        json.dumps({name: function() for name, function in functions.items()})
    )
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    world_size, folder, file, *names = sys.argv[1:]
    content = runpy.run_path(file)
    functions = {name: content[name] for name in names}
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(
            target=_rank, args=(functions, rank, int(world_size), Path(folder)), daemon=True
        )
        for rank in range(int(world_size))
    ]
    for process in ranks:
        process.start()
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)  # type: ignore[arg-type]  # sentinels are ints
            process.join()
            if process.exitcode:
                return 1  # the daemons end with this process
    return 0


if __name__ == "__main__":
    sys.exit(main())
