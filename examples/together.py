"""Calls of all ranks at once, and what is raised when one of them dies."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TypeVar

from async_policy import ActorLostError

R = TypeVar("R")

LAST_WORDS_S = 10.0
"""How long ranks have to say what happened to them, once one has failed."""


async def together(calls: Iterable[Coroutine[object, object, R]]) -> list[R]:
    """What all ranks answer.

    When one dies the others fail in the middle of a collective, and any of them may be heard
    first: a little later it is known who is gone, and that is what is raised.

    Raises:
        ActorLostError: names all ranks that are gone.
        Exception: the first error, if none is gone.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if errors_of(tasks):
            await asyncio.wait(tasks, timeout=LAST_WORDS_S)
        errors = errors_of(tasks)
        lost = [error for error in errors if isinstance(error, ActorLostError)]
        if lost:
            raise ActorLostError("; ".join(map(str, lost))) from lost[0]
        if errors:
            raise errors[0]
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()  # those that are not done


def errors_of(tasks: Iterable["asyncio.Future[R]"]) -> list[BaseException]:
    """What those raised that are done."""
    done = [task for task in tasks if task.done() and not task.cancelled()]
    return [error for task in done if (error := task.exception()) is not None]
