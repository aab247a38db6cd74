"""A driver whose three Ray workers report their environment; run by test_workers.py."""

import asyncio
import json
import os
import subprocess
import sys

import attrs

from async_policy import Cluster, local_cluster, wait_ready
from device_env import WorkerEnvironment, collect, compare, runtime_env, visible_devices

CHILD = "import os; print(os.environ.get('HCCL_CONNECT_TIMEOUT'))"


class Reporter:
    """An actor that says what it has in its environment."""

    def report(self, worker: str) -> WorkerEnvironment:
        """What this process has."""
        return collect(os.environ, worker=worker, node=f"node-{worker[-1]}")

    def child(self) -> str:
        """What a process has that this one starts, as vLLM does with its workers."""
        done = subprocess.run(
            [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    def devices(self) -> tuple[str, ...] | None:
        """Physical ids of the GPUs that Ray chose for this process."""
        return visible_devices("cuda", os.environ).ids


async def ask(cluster: Cluster) -> dict[str, object]:
    """Start the workers, one of them with a value of its own, and compare them."""
    own = {"HCCL_CONNECT_TIMEOUT": "300"}
    actors = [
        cluster.actor(
            f"worker-{index}",
            num_cpus=1,
            num_gpus=1 if index < 2 else 0,
            environment=own if index == 2 else None,
        ).start(Reporter)
        for index in range(3)
    ]
    await wait_ready(actors, timeout_s=120)
    found = [
        await actor.call(Reporter.report, f"worker-{index}") for index, actor in enumerate(actors)
    ]
    return {
        "differences": [str(difference) for difference in compare(found)],
        "reports": [attrs.asdict(one) for one in found],
        "child": await actors[0].call(Reporter.child),
        "devices": [await actor.call(Reporter.devices) for actor in actors[:2]],
        "driver": os.environ.get("HCCL_CONNECT_TIMEOUT"),
    }


def main() -> None:
    """Print what was found as JSON."""
    variables = {"HCCL_CONNECT_TIMEOUT": "1500", "VLLM_ASCEND_ENABLE_NZ": "0"}
    with local_cluster(
        num_cpus=3,
        num_gpus=2,
        environment=runtime_env(variables)["env_vars"],
        object_store_bytes=100 << 20,
    ) as cluster:
        print(json.dumps(asyncio.run(ask(cluster))))  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
