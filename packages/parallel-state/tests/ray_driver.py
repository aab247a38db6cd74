"""Sends values to a Ray actor and back; a process of its own, since Ray sets what it pleases.

Usage: ray_driver.py REPORT. Writes what it saw to the file REPORT, as JSON.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from async_policy import Actor, local_cluster, wait_ready
from parallel_state import ExtraParallelSizes, ParallelState

SIZES = ExtraParallelSizes({"ep": 8, "emb": 2})
STATE = ParallelState(dp_size=16, dp_replicate_size=2, extra_parallel_sizes=SIZES)


class Echo:
    """Says what it got, and sends it back."""

    def process(self) -> int:
        return os.getpid()

    def is_found(self, state: ParallelState[Any]) -> bool:
        """Whether the value that travelled is the key that this process would build."""
        sizes = ExtraParallelSizes({"ep": 8, "emb": 2})
        own = ParallelState(dp_size=16, dp_replicate_size=2, extra_parallel_sizes=sizes)
        return {own: True}[state] and {sizes: True}[state.extra_parallel_sizes]

    def sizes(self, sizes: ExtraParallelSizes[Any]) -> ExtraParallelSizes[Any]:
        return sizes

    def state(self, state: ParallelState[Any]) -> ParallelState[Any]:
        return state


async def report(actor: Actor[Echo]) -> dict[str, object]:
    await wait_ready([actor], timeout_s=120.0)
    sizes = await actor.call(Echo.sizes, SIZES)
    state = await actor.call(Echo.state, STATE)
    return {
        "in another process": await actor.call(Echo.process) != os.getpid(),
        "found there": await actor.call(Echo.is_found, STATE),
        "sizes": sizes == SIZES and type(sizes) is ExtraParallelSizes,
        "order": list(sizes),
        "state": state == STATE and type(state) is ParallelState,
        "same hash": hash(state) == hash(STATE) and hash(sizes) == hash(SIZES),
    }


def main(path: str) -> None:
    with local_cluster(num_cpus=1, object_store_bytes=100 * 2**20) as cluster:
        seen = asyncio.run(report(cluster.actor("echo").start(Echo)))
    Path(path).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
