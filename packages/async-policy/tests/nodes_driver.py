"""A driver process for `test_nodes.py`: a Ray cluster of several nodes on this machine.

Usage: nodes_driver.py REPORT. Writes what it saw to the file REPORT, as JSON.
"""

import asyncio
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs

from async_policy import (
    Actor,
    AsyncPolicyError,
    Cluster,
    JsonValue,
    PoolLimits,
    Rollouts,
    Scheduler,
    SchedulerConfig,
    Ticket,
    WorkerPool,
    connect,
    reserve,
    wait_ready,
    write_json,
)
from async_policy.cluster_processes import CLUSTER_MARK, end_processes, guarded
from device_env import PER_WORKER, WorkerEnvironment, collect, compare, visible_devices
from rl_contracts.rollout import PolicyVersion

OWN = {"HCCL_CONNECT_TIMEOUT": "300"}
"""What one node has in its environment, and the others have not."""


PER_NODE = {*PER_WORKER, "RAY_RAYLET_PID"}


class Place:
    """A sampler that says where it is."""

    def __init__(self) -> None:
        self.version = 0

    async def node(self) -> str:
        import ray  # noqa: PLC0415 -- in the actor

        return str(ray.get_runtime_context().get_node_id())

    async def devices(self) -> tuple[str, ...] | None:
        return visible_devices("cuda", os.environ).ids

    async def sample(self, index: int) -> tuple[int, int]:
        """The group, and the version of its first token."""
        oldest = self.version
        await asyncio.sleep(0.02)
        return index, oldest

    async def load(self, version: int) -> None:
        self.version = version


def environment() -> WorkerEnvironment:
    """What this process has."""
    return collect(os.environ, worker="worker")


def failure() -> None:
    message = "no driver for this card"
    raise OSError(message)


async def environments(cluster: Cluster) -> dict[str, JsonValue]:
    """Every node's environment, compared."""
    found = await cluster.on_each_node(environment)
    (own,) = [node.name for node in cluster.nodes() if node.num_cpus and not node.num_gpus]
    named = [attrs.evolve(one, node=name) for name, one in found.items()]
    return {
        "nodes": list(found),
        "own": own,
        "differences": [str(difference) for difference in compare(named, ignore=PER_NODE)],
        "failure": await error_of(lambda: cluster.on_each_node(failure)),
    }


async def error_of(wait: Callable[[], Awaitable[object]]) -> str:
    try:
        await wait()
    except AsyncPolicyError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


async def ranks(cluster: Cluster) -> dict[str, JsonValue]:
    """Two ranks of one engine, and three that no node has room for."""
    pair = reserve(cluster, "engine", num_ranks=2, num_cpus=1.0)
    actors = [pair.actor(f"rank-{rank}", rank=rank).start(Place) for rank in range(2)]
    await wait_ready(actors, timeout_s=60.0)
    together = [await actor.call(Place.node) for actor in actors]
    for actor in actors:
        actor.stop()
    pair.release()

    async def too_many() -> None:
        reserve(cluster, "big engine", num_ranks=3, num_cpus=1.0, timeout_s=1.0)

    return {"together": together, "too many": await error_of(too_many)}


async def devices(cluster: Cluster) -> dict[str, JsonValue]:
    """Two actors share a GPU, a third has the other; one without may see all, or none."""
    shares = {"half-0": 0.5, "half-1": 0.5, "whole": 1.0, "unasked": 0.0, "hidden": 0.0}
    hide = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
    actors = [
        cluster.actor(
            name, num_cpus=0.25, num_gpus=share, environment=hide if name == "hidden" else None
        ).start(Place)
        for name, share in shares.items()
    ]
    await wait_ready(actors, timeout_s=60.0)
    found = {actor.name: await actor.call(Place.devices) for actor in actors}
    for actor in actors:
        actor.stop()
    return {name: None if ids is None else list(ids) for name, ids in found.items()}


async def node_dies(cluster: Cluster, kill: Callable[[str], None]) -> dict[str, JsonValue]:
    """A whole node is killed while its workers sample."""
    limits = PoolLimits(start_s=60.0, max_restarts=5, restart_s=0.2)
    names = ["worker-0", "worker-1", "worker-2"]
    schedule = SchedulerConfig(num_steps=8, groups_per_step=4, max_staleness=1)
    consumed: list[int] = []

    def start(name: str) -> Actor[Place]:
        return cluster.actor(name, num_cpus=1.0).start(Place)

    async with WorkerPool(start, limits=limits) as pool:
        await pool.join(*names)

        async def sample(ticket: Ticket) -> tuple[int, int]:
            return await pool.call(
                lambda actor: actor.call(Place.sample, ticket.index), what=str(ticket)
            )

        async def publish(version: PolicyVersion) -> None:
            await pool.publish(version, lambda actor: actor.call(Place.load, version))

        victim = await pool.call(lambda actor: actor.call(Place.node), what="a look at it")
        async with Rollouts(
            Scheduler(schedule),
            sample=sample,
            oldest_version=lambda group: PolicyVersion(group[1]),
            publish=publish,
            max_attempts=10,
        ) as rollouts:
            async for batch in rollouts.batches():
                consumed += [index for index, _ in batch.groups]
                version = PolicyVersion(batch.version + 1)
                rollouts.trained(version)
                if version == 3:
                    kill(victim)
                    # its workers end a little later, maybe after the few steps of this run
                    async with asyncio.timeout(60.0):
                        await pool._until(lambda: any(w.num_restarts for w in pool.status))
                await rollouts.publish(version)
        status: list[JsonValue] = [[w.name, w.num_restarts] for w in pool.status]
    return {"consumed": list(consumed), "status": status}


async def everything(cluster: Cluster, kill: Callable[[str], None]) -> dict[str, JsonValue]:
    log: list[JsonValue] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.append(f"{record.levelname} {record.getMessage()}")

    logging.getLogger("async_policy").addHandler(Keep())
    return {
        "environments": await environments(cluster),
        "ranks": await ranks(cluster),
        "devices": await devices(cluster),
        "node dies": await node_dies(cluster, kill),
        "log": log,
    }


def main() -> None:
    """Build the cluster, use everything once."""
    os.environ |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    mark = secrets.token_hex(8)
    folder = Path(tempfile.mkdtemp(prefix="rl-ray-"))
    (folder / "ray").mkdir()
    os.environ["RAY_TMPDIR"] = str(folder)
    with guarded(mark, folder) as all_done:
        from ray.cluster_utils import Cluster as RayCluster  # noqa: PLC0415 -- not before

        os.environ[CLUSTER_MARK] = mark
        size = 100 * 2**20
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": size}
        ray_cluster = RayCluster(initialize_head=True, head_node_args=head)
        ray_cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=size)
        ray_cluster.add_node(num_cpus=2, num_gpus=0, object_store_memory=size, env_vars=OWN)
        del os.environ[CLUSTER_MARK]

        def kill(node_id: str) -> None:
            (node,) = [n for n in ray_cluster.worker_nodes if n.node_id == node_id]
            ray_cluster.remove_node(node, allow_graceful=False)

        try:
            with connect(address=ray_cluster.address) as cluster:
                write_json(Path(sys.argv[1]), asyncio.run(everything(cluster, kill)))
        finally:
            ray_cluster.shutdown()  # type: ignore[no-untyped-call]
            end_processes(mark, folder, grace_s=2.0)
            shutil.rmtree(folder)
            all_done()


if __name__ == "__main__":
    main()
