"""What the scheduler, the queue and Ray cost per trajectory, when sampling itself costs nothing.

Three parts, each around the one before: the state machine alone; `Rollouts`, with a task per group;
a `WorkerPool` of Ray actors that answer at once with groups of completions. A group has 8
trajectories, as in the examples. The first two run in one thread and are timed by its CPU time,
medians of `--repeats`; the last is timed by the wall, with as many groups in flight as the schedule
lets in, and needs the machine for itself.

    ./run benchmarks/async_cost.py --output benchmarks/results/async_cost.json
"""

import argparse
import asyncio
import gc
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from async_policy import (
    Actor,
    Cluster,
    Refill,
    Rollouts,
    Scheduler,
    SchedulerConfig,
    Ticket,
    WorkerPool,
    local_cluster,
)
from rl_contracts import PolicyVersion

GROUP_SIZE = 8
TARGET_PER_SECOND = 20_000
TARGET_MS = 1.0


@dataclass(frozen=True, kw_only=True)
class Group:
    """What a sampler returns, as far as its size matters."""

    version: int
    keep: bool
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


def schedules(num_steps: int) -> dict[str, SchedulerConfig]:
    """The schedules that are compared, of 64 groups a step, 2 steps off."""

    def build(*, refill: Refill | None = None, completion: bool = False) -> SchedulerConfig:
        return SchedulerConfig(
            num_steps=num_steps,
            groups_per_step=64,
            max_staleness=2,
            order="completion" if completion else "data",
            refill=refill,
        )

    refill = Refill(max_rounds=4, incomplete="yield")
    return {
        "data order": build(),
        "completion order": build(completion=True),
        "data order, every third group set aside": build(refill=refill),
        "completion order, every third group set aside": build(refill=refill, completion=True),
    }


def kept(config: SchedulerConfig, index: int) -> bool:
    """Whether this group is trained on."""
    return config.refill is None or index % 3 != 0


def run_scheduler(config: SchedulerConfig) -> int:
    """Drive the state machine alone, groups ending in any order; returns the groups sampled."""
    chance = random.Random(0)  # noqa: S311 -- no secret
    scheduler = Scheduler(config)
    in_flight: list[Ticket] = []
    while not scheduler.finished:
        in_flight += scheduler.admit()
        while (batch := scheduler.take_batch()) is None:
            last = chance.randrange(len(in_flight))
            in_flight[last], in_flight[-1] = in_flight[-1], in_flight[last]
            ticket = in_flight.pop()
            scheduler.complete(ticket, ticket.admitted_version, keep=kept(config, ticket.index))
            if not scheduler.num_in_flight:
                in_flight += scheduler.admit()
        version = PolicyVersion(batch[0].version + 1)
        scheduler.trained(version)
        scheduler.published(version)
    return scheduler.num_trained_groups + scheduler.num_set_aside


def run_rollouts(config: SchedulerConfig) -> int:
    """The same through `Rollouts`, with a sampler that answers at the next turn of the loop."""
    newest = PolicyVersion(0)

    async def sample(ticket: Ticket) -> tuple[PolicyVersion, bool]:
        version = newest
        await asyncio.sleep(0)
        return version, kept(config, ticket.index)

    async def publish(version: PolicyVersion) -> None:
        nonlocal newest
        newest = version

    async def loop() -> int:
        scheduler = Scheduler(config)
        async with Rollouts(
            scheduler,
            sample=sample,
            oldest_version=lambda group: group[0],
            publish=publish,
            keep=None if config.refill is None else lambda group: group[1],
        ) as rollouts:
            async for batch in rollouts.batches():
                version = PolicyVersion(batch.version + 1)
                rollouts.trained(version)
                await rollouts.publish(version)
        return scheduler.num_trained_groups + scheduler.num_set_aside

    return asyncio.run(loop())


class Sampler:
    """Answers at once with a group of completions of this many tokens."""

    def __init__(self, num_tokens: int) -> None:
        """Make the answer beforehand."""
        self._version = 0
        self._ids = tuple(tuple(range(num_tokens)) for _ in range(GROUP_SIZE))
        self._logprobs = tuple(tuple(-0.5 for _ in range(num_tokens)) for _ in range(GROUP_SIZE))

    async def sample(self, index: int) -> Group:
        """The group."""
        return Group(
            version=self._version,
            keep=index % 3 != 0,
            token_ids=self._ids,
            logprobs=self._logprobs,
        )

    async def load(self, version: int) -> None:
        """Take no weights."""
        self._version = version


async def run_ray(cluster: Cluster, *, num_tokens: int, num_steps: int) -> float:
    """Seconds for the whole run, start aside, divided by its trajectories."""
    config = SchedulerConfig(num_steps=num_steps, groups_per_step=16, max_staleness=2)

    def start(name: str) -> Actor[Sampler]:
        return cluster.actor(name, num_cpus=0.5).start(Sampler, num_tokens)

    async with WorkerPool(start) as pool:
        await pool.join(*(f"sampler-{num_tokens}-{number}" for number in range(2)))

        async def sample(ticket: Ticket) -> Group:
            return await pool.call(
                lambda actor: actor.call(Sampler.sample, ticket.index), what=str(ticket)
            )

        async def publish(version: PolicyVersion) -> None:
            await pool.publish(version, lambda actor: actor.call(Sampler.load, version))

        begin = 0.0
        async with Rollouts(
            Scheduler(config),
            sample=sample,
            oldest_version=lambda group: PolicyVersion(group.version),
            publish=publish,
        ) as rollouts:
            async for batch in rollouts.batches():
                begin = begin or time.monotonic()  # after the first batch: all is warm
                version = PolicyVersion(batch.version + 1)
                rollouts.trained(version)
                await rollouts.publish(version)
        seconds = time.monotonic() - begin
    return seconds / ((num_steps - 1) * config.groups_per_step * GROUP_SIZE)


def rate(run: Callable[[SchedulerConfig], int], config: SchedulerConfig, repeats: int) -> float:
    """Trajectories per second of CPU time, the median."""
    rates = []
    for _ in range(repeats):
        gc.collect()
        begin = time.process_time()
        num_groups = run(config)
        rates.append(num_groups * GROUP_SIZE / (time.process_time() - begin))
    return statistics.median(rates)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of a run")
    parser.add_argument("--repeats", type=int, default=5, help="runs, of which the median counts")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()

    with local_cluster(num_cpus=2, object_store_bytes=2**28) as cluster:
        per_trajectory = {
            str(num_tokens): 1000.0
            * asyncio.run(run_ray(cluster, num_tokens=num_tokens, num_steps=args.steps))
            for num_tokens in (16, 512, 4096)
        }
    measured = {
        name: {
            "scheduler": rate(run_scheduler, config, args.repeats),
            "scheduler and queue": rate(run_rollouts, config, args.repeats),
        }
        for name, config in schedules(args.steps).items()
    }
    result = {
        "trajectories_per_group": GROUP_SIZE,
        "trajectories_per_second_of_one_core": measured,
        "target_trajectories_per_second": TARGET_PER_SECOND,
        "milliseconds_per_trajectory_with_ray_by_tokens": per_trajectory,
        "target_milliseconds_per_trajectory": TARGET_MS,
        "steps": args.steps,
        "repeats": args.repeats,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average_at_the_end": os.getloadavg()[0],
    }
    for name, rates in measured.items():
        for part, value in rates.items():
            print(f"{value:12,.0f} trajectories/s  {part}, {name}")
    for tokens, value in per_trajectory.items():
        print(f"{value:12.3f} ms/trajectory   with Ray, {tokens} tokens each")
    slowest = min(rates["scheduler and queue"] for rates in measured.values())
    print(
        f"slowest against the target of {TARGET_PER_SECOND:,}: {slowest / TARGET_PER_SECOND:.1f}x"
    )
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
