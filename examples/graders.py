"""Who grades the answers: this process, or processes of their own that may die.

A reward may wait for a sandbox, a judge or a stuck comparison, and may take a processor for itself;
in processes of their own it takes none from the loop. One that dies is replaced, and what it had
in hand is graded again: the completions are not sampled again for it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import final

from async_policy import Actor, Cluster, GroupLostError, PoolLimits, WorkerPool
from rl_contracts import FinishReason
from rl_tasks import Problem, Reward, RewardResult, grade

PROBLEMS_AT_A_TIME = 16
"""Of one grader, in threads."""

MAX_RESTARTS = 100
"""How often one grader is replaced in a whole run."""

MAX_ATTEMPTS = 3
"""How often the answers to one problem are graded, at most, when the grader dies each time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Answers to one problem."""

    problem: Problem

    texts: tuple[str, ...]
    """The completions alone."""

    finish_reasons: tuple[FinishReason, ...]
    """How each ended."""


Grade = Callable[[Answers], Awaitable[list[RewardResult]]]
"""Rewards the answers to one problem, in their order."""


def grade_answers(rewards: Mapping[str, Reward], answers: Answers) -> list[RewardResult]:
    """Reward each answer by the problem's data source."""
    return [
        grade(rewards, answers.problem, text=text, finish_reason=finish_reason)
        for text, finish_reason in zip(answers.texts, answers.finish_reasons, strict=True)
    ]


def graded_here(rewards: Mapping[str, Reward]) -> Grade:
    """Grade in threads of this process."""

    async def graded(answers: Answers) -> list[RewardResult]:
        return await asyncio.to_thread(grade_answers, rewards, answers)

    return graded


@final
class Grader:
    """Grades in a process of its own."""

    def __init__(self, rewards: Mapping[str, Reward]) -> None:
        self._rewards = rewards

    async def grade(self, answers: Answers) -> list[RewardResult]:
        """Reward each answer, in a thread: some rewards wait for others."""
        return await asyncio.to_thread(grade_answers, self._rewards, answers)


@final
class Graders:
    """Several graders as one. Made by `graders`."""

    def __init__(self, pool: WorkerPool[Grader], *, count: int) -> None:
        self._pool = pool
        # what waits, waits here: a grader's time limit is for what it has in hand
        self._in_hand = asyncio.Semaphore(count * PROBLEMS_AT_A_TIME)
        self.losses: list[str] = []
        """What had to be graded again, and why, oldest first."""

    async def grade(self, answers: Answers) -> list[RewardResult]:
        """Have the least busy process grade.

        Raises:
            GroupLostError: if it died each time.
            ActorMethodError: if a reward raised.
            WorkerPoolError: if no process is left.
        """
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                async with self._in_hand:
                    return await self._pool.call(
                        lambda actor: actor.call(Grader.grade, answers),
                        what=f"grading of {answers.problem.problem_id}",
                    )
            except GroupLostError as error:
                if attempt == MAX_ATTEMPTS:
                    raise
                self.losses.append(str(error))
        raise AssertionError("the last attempt returns or raises")


@contextlib.asynccontextmanager
async def graders(
    cluster: Cluster, rewards: Mapping[str, Reward], *, count: int
) -> AsyncIterator[Graders]:
    """Processes that grade, for the body of an ``async with`` statement."""

    def start(name: str) -> Actor[Grader]:
        return cluster.actor(name).start(Grader, rewards)

    async with WorkerPool(start, limits=PoolLimits(max_restarts=MAX_RESTARTS)) as pool:
        await pool.join(*(f"grader {number}" for number in range(count)))
        yield Graders(pool, count=count)
