"""Several coroutines at once, of which one error ends all."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TypeVar

T = TypeVar("T")


async def gathered(work: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Results of all, in order.

    The first error is raised as it is, with its own cause, once the others were cancelled and have
    ended; `asyncio.TaskGroup` would wrap it, and `asyncio.gather` leave the others running.
    """
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
