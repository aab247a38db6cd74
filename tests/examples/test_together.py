"""What ranks that are called together raise, when one of them dies."""

import asyncio
import sys
from pathlib import Path

import pytest

from async_policy import ActorLostError, ActorMethodError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from together import together


async def answers(value: int) -> int:
    return value


async def fails(error: Exception, *, after: float = 0.0) -> int:
    await asyncio.sleep(after)
    raise error


def test_answers_keep_the_order_of_the_ranks() -> None:
    assert asyncio.run(together([answers(0), answers(1), answers(2)])) == [0, 1, 2]


def test_the_rank_that_is_gone_is_named_and_not_the_first_to_complain() -> None:
    """A collective fails on rank 0 because rank 1 was killed; both are heard."""
    reset = ActorMethodError("rank 0: connection reset by peer")
    calls = [fails(reset), fails(ActorLostError("rank 1 is gone"), after=0.05), answers(2)]
    with pytest.raises(ActorLostError, match="rank 1 is gone"):
        asyncio.run(together(calls))
    both = [fails(ActorLostError("rank 0")), fails(ActorLostError("rank 1"), after=0.05)]
    with pytest.raises(ActorLostError, match="rank 0; rank 1"):
        asyncio.run(together(both))


def test_an_error_of_one_rank_is_raised_as_it_is() -> None:
    with pytest.raises(ActorMethodError, match="no such folder"):
        asyncio.run(together([answers(0), fails(ActorMethodError("no such folder"))]))


def test_cancelling_cancels_the_calls() -> None:
    """A second Ctrl-C leaves no call behind."""
    cancelled = []

    async def waits() -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return 0

    async def run() -> None:
        task = asyncio.create_task(together([waits(), waits()]))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert cancelled == [True, True]
