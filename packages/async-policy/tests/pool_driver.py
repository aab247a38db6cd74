"""A driver process for `test_worker_pool.py`: real actors that are killed, stopped and replaced.

Usage: pool_driver.py MODE REPORT [SEED]. Writes what it saw to the file REPORT, as JSON.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from async_policy import (
    Actor,
    AsyncPolicyError,
    Batch,
    CheckpointStore,
    Cluster,
    JsonValue,
    PoolLimits,
    Refill,
    Rollouts,
    Scheduler,
    SchedulerConfig,
    Ticket,
    WorkerPool,
    local_cluster,
    read_json,
    write_json,
)
from rl_contracts.rollout import PolicyVersion

NUM_STEPS = 10
SCHEDULE = SchedulerConfig(
    num_steps=NUM_STEPS,
    groups_per_step=4,
    max_staleness=2,
    refill=Refill(max_rounds=4, incomplete="raise"),
)
LIMITS = PoolLimits(call_s=30.0, start_s=60.0, load_s=30.0, max_restarts=20, restart_s=0.05)


def draw(index: int) -> int:
    """What a group with this seed looks like, wherever it is sampled."""
    return random.Random(index).randrange(10**9)  # noqa: S311 -- no secret


@dataclass(frozen=True, kw_only=True)
class Group:
    """What the toy sampler returns."""

    index: int
    value: int
    oldest_version: int
    process: int


class Sampler:
    """Samples groups for a few hundredths of a second.

    With `stalls_at`, the first to sample that group stops in the middle and never goes on.
    """

    def __init__(self, stalls_at: int | None, stalled: Path) -> None:
        self.version = 0
        self.stalls_at = stalls_at
        self.stalled = stalled

    async def sample(self, index: int) -> Group:
        oldest = self.version
        if index == self.stalls_at and not self.stalled.exists():
            self.stalled.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        await asyncio.sleep(0.01 + draw(index) % 50 / 1000)
        return Group(index=index, value=draw(index), oldest_version=oldest, process=os.getpid())

    async def load(self, version: int) -> None:
        await asyncio.sleep(0.01)
        self.version = version

    async def process(self) -> int:
        return os.getpid()


class Broken:
    """A sampler that cannot start."""

    def __init__(self) -> None:
        message = "no such model"
        raise OSError(message)


@dataclass
class Run:
    """A training run over a pool of samplers."""

    pool: WorkerPool[Sampler]
    scheduler: Scheduler = field(default_factory=lambda: Scheduler(SCHEDULE))
    batches: list[Batch[Group]] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    redone: int = 0

    async def sample(self, ticket: Ticket) -> Group:
        return await self.pool.call(
            lambda actor: actor.call(Sampler.sample, ticket.index), what=str(ticket)
        )

    async def publish(self, version: PolicyVersion) -> None:
        await self.pool.publish(version, lambda actor: actor.call(Sampler.load, version))
        self.published.append(version)

    async def train(self, after_step: Callable[[int], Awaitable[None]]) -> None:
        async with Rollouts(
            self.scheduler,
            sample=self.sample,
            oldest_version=lambda group: PolicyVersion(group.oldest_version),
            publish=self.publish,
            keep=lambda group: group.value % 4 != 0,
            max_attempts=10,
        ) as rollouts:
            await rollouts.publish(self.scheduler.trained_version)
            async for batch in rollouts.batches():
                self.batches.append(batch)
                self.redone += batch.activity.num_redone
                await asyncio.sleep(0.05)
                version = PolicyVersion(batch.version + 1)
                rollouts.trained(version)
                await after_step(version)
                await rollouts.publish(version)

    def report(self) -> dict[str, JsonValue]:
        groups = [group for batch in self.batches for group in (*batch.groups, *batch.set_aside)]
        return {
            "steps": [[group.index for group in batch.groups] for batch in self.batches],
            "set aside": [[group.index for group in batch.set_aside] for batch in self.batches],
            "mixed": [group.index for group in groups if group.value != draw(group.index)],
            "staleness": [list(batch.staleness) for batch in self.batches],
            "published": list(self.published),
            "redone": self.redone,
            "lost": self.pool.num_lost,
            "processes": sorted({group.process for group in groups}),
            "status": [[w.name, w.state, w.version, w.num_restarts] for w in self.pool.status],
        }


async def nothing(_: int) -> None:
    """Between two steps."""


async def process_of(pool: WorkerPool[Sampler]) -> int:
    """The process of the least busy worker."""
    return await pool.call(lambda actor: actor.call(Sampler.process), what="a look at it")


@contextlib.asynccontextmanager
async def pool_of(
    cluster: Cluster,
    *names: str,
    limits: PoolLimits = LIMITS,
    stalls_at: int | None = None,
    stalled: Path = Path("nowhere"),
) -> AsyncIterator[WorkerPool[Sampler]]:
    """A pool with these workers."""

    def start(name: str) -> Actor[Sampler]:
        return cluster.actor(name, num_cpus=0.5).start(Sampler, stalls_at, stalled)

    async with WorkerPool(start, limits=limits) as pool:
        await pool.join(*names)
        yield pool


async def undisturbed(cluster: Cluster) -> dict[str, JsonValue]:
    async with pool_of(cluster, "calm-0", "calm-1") as pool:
        run = Run(pool)
        await run.train(nothing)
        return run.report()


async def killed(cluster: Cluster, seed: int) -> dict[str, JsonValue]:
    """kill -9 of a worker at random moments, of one that serves each time."""
    chance = random.Random(seed)  # noqa: S311 -- no secret
    kills = 0
    names = [f"mortal-{seed}-{number}" for number in range(3)]
    async with pool_of(cluster, *names) as pool:
        run = Run(pool)

        async def reap() -> None:
            nonlocal kills
            while kills < 5:
                await asyncio.sleep(chance.uniform(0.0, 0.2))
                with contextlib.suppress(AsyncPolicyError):
                    os.kill(await process_of(pool), signal.SIGKILL)
                    kills += 1

        reaper = asyncio.create_task(reap())
        await run.train(nothing)
        reaper.cancel()
        await asyncio.gather(reaper, return_exceptions=True)
        return {**run.report(), "kills": kills}


async def stalled(cluster: Cluster, folder: Path) -> dict[str, JsonValue]:
    """A worker that stops in the middle of a group for ever is relieved at its deadline."""
    limits = PoolLimits(call_s=1.0, start_s=60.0, load_s=60.0, max_restarts=3, restart_s=0.05)
    mark = folder / "stalled"
    async with pool_of(
        cluster, "still-0", "still-1", limits=limits, stalls_at=9, stalled=mark
    ) as pool:
        run = Run(pool)
        await run.train(nothing)
        victim = Path("/proc", mark.read_text())
        for _ in range(200):
            if not victim.exists():  # noqa: ASYNC240 -- no disk behind it
                break
            await asyncio.sleep(0.05)
        return {**run.report(), "victim there": victim.exists()}  # noqa: ASYNC240


async def elastic(cluster: Cluster) -> dict[str, JsonValue]:
    """One worker at first, two more after step 2, and the first leaves after step 5."""
    async with pool_of(cluster, "first") as pool:
        run = Run(pool)
        first = await process_of(pool)

        async def change(version: int) -> None:
            if version == 2:
                await pool.join("second", "third")
            if version == 5:
                await pool.leave("first")

        await run.train(change)
        late = [group.process for batch in run.batches[8:] for group in batch.groups]
        return {**run.report(), "first": first, "late": sorted(set(late))}


async def error_of(cluster: Cluster, case: str) -> str:
    """Type and text of the error that a pool without hope ends in."""
    try:
        if case == "broken":
            limits = PoolLimits(max_restarts=1, restart_s=0.05)

            def start(name: str) -> Actor[Broken]:
                return cluster.actor(name, num_cpus=0.5).start(Broken)

            async with WorkerPool(start, limits=limits) as pool:
                await pool.join("broken-0")
        elif case == "mistaken":

            def misspelt(name: str) -> Actor[Broken]:
                raise KeyError(name)

            async with WorkerPool(misspelt) as pool:
                await pool.join("mistaken-0")
        else:
            limits = PoolLimits(max_restarts=0)
            async with pool_of(cluster, "only", limits=limits) as samplers:
                os.kill(await process_of(samplers), signal.SIGKILL)
                await Run(samplers).train(nothing)
    except AsyncPolicyError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


async def everything(cluster: Cluster, folder: Path) -> dict[str, JsonValue]:
    """Each fault once, one after the other."""
    log: list[JsonValue] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.append(f"{record.levelname} {record.getMessage()}")

    logging.getLogger("async_policy").addHandler(Keep())
    runs: dict[str, Callable[[], Awaitable[JsonValue]]] = {
        "undisturbed": lambda: undisturbed(cluster),
        "killed 0": lambda: killed(cluster, 0),
        "killed 1": lambda: killed(cluster, 1),
        "stalled": lambda: stalled(cluster, folder),
        "elastic": lambda: elastic(cluster),
        "broken": lambda: error_of(cluster, "broken"),
        "mistaken": lambda: error_of(cluster, "mistaken"),
        "all dead": lambda: error_of(cluster, "all dead"),
    }
    seen: dict[str, JsonValue] = {}
    seconds: dict[str, JsonValue] = {}
    for name, run in runs.items():
        begin = time.monotonic()
        seen[name] = await run()
        seconds[name] = time.monotonic() - begin
    seen |= {"log": log, "seconds": seconds}
    return seen


async def resumable(cluster: Cluster, folder: Path) -> None:
    """A run that writes a checkpoint after every step, and goes on from the last one."""
    store = CheckpointStore(folder, keep=1)
    latest = store.latest()
    consumed: list[JsonValue] = []
    scheduler = Scheduler(SCHEDULE)
    if latest is not None:
        saved = read_json(latest.path / "run.json")
        assert isinstance(saved, dict)
        scheduler = Scheduler.from_state(saved["scheduler"], SCHEDULE)
        consumed = saved["consumed"]

    async def checkpoint(version: int) -> None:
        batch = run.batches[-1]
        indices = [[group.index for group in part] for part in (batch.groups, batch.set_aside)]
        consumed.append([*indices, max(batch.staleness)])
        state: JsonValue = {"scheduler": run.scheduler.state(), "consumed": consumed}
        store.write(version, lambda folder: write_json(folder / "run.json", state))

    async with pool_of(cluster, "sampler-0", "sampler-1") as pool:
        run = Run(pool, scheduler)
        await run.train(checkpoint)


def main() -> None:
    """Run the mode that the command line names."""
    mode, path = sys.argv[1], Path(sys.argv[2])
    with local_cluster(num_cpus=2, object_store_bytes=100 * 2**20) as cluster:
        if mode == "everything":
            write_json(path, asyncio.run(everything(cluster, path.parent)))
        else:
            asyncio.run(resumable(cluster, path))


if __name__ == "__main__":
    main()
