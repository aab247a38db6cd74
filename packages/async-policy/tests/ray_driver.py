"""A driver process for `test_ray_cluster.py`: ray must not have been imported before it starts.

Usage: ray_driver.py MODE REPORT. Writes what it saw to the file REPORT, as JSON.
"""

import asyncio
import ipaddress
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import assert_type

from async_policy import (
    Actor,
    AsyncPolicyError,
    Cluster,
    JsonValue,
    describe_failure,
    local_cluster,
    wait_ready,
    write_json,
)

OBJECT_STORE_BYTES = 100 * 2**20


class Counter:
    """A well-behaved actor, as far as it is told to."""

    def __init__(self, start: int) -> None:
        self.value = start
        self.cancelled = False

    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    async def process(self) -> int:
        return os.getpid()

    def add(self, number: int) -> int:
        self.value += number
        return self.value

    async def refuse(self) -> None:
        message = "no thanks"
        raise KeyError(message)

    async def wait(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def was_cancelled(self) -> bool:
        return self.cancelled

    def start_child(self) -> int:
        """A process that outlives its parent, as an inference engine's may."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    async def complain_and_wait(self) -> None:
        sys.stderr.write("about to be killed\n")
        sys.stderr.flush()
        await asyncio.Event().wait()


class Broken:
    """An actor whose constructor raises."""

    def __init__(self) -> None:
        message = "no disk"
        raise OSError(message)


class Slow:
    """An actor whose constructor does not come to an end."""

    def __init__(self) -> None:
        time.sleep(600)


def descendants(process: int) -> list[int]:
    """Ids of all processes below one, from the parents that the kernel knows."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(after_name[1]), []).append(int(path.parent.name))
    found = children.get(process, [])
    return found + [below for child in found for below in descendants(child)]


def listening_addresses(processes: list[int]) -> list[str]:
    """Addresses on which the processes accept TCP connections."""
    inodes = set()
    for process in processes:
        for path in Path(f"/proc/{process}/fd").iterdir():
            try:
                inodes.add(str(path.readlink()).removeprefix("socket:[").removesuffix("]"))
            except FileNotFoundError:
                continue
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                text = fields[1].partition(":")[0]
                words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
                addresses.append(str(ipaddress.ip_address(b"".join(words))))
    return addresses


async def error_of(actor: Actor[Counter], call: str) -> str:
    """Type and text of the error that a call ends in."""
    try:
        match call:
            case "refuse":
                await actor.call(Counter.refuse)
            case "wait":
                await actor.call(Counter.wait)
            case "wrong type":
                await actor.call(Counter.add, "2")  # type: ignore[call-overload]
            case _:
                await actor.call(Counter.complain_and_wait)
    except AsyncPolicyError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


async def not_ready(cluster: Cluster, name: str, cls: type[Broken | Slow]) -> str:
    """Type and text of the error of an actor that does not become ready."""
    actor = cluster.actor(name, num_cpus=0.0).start(cls)
    limit = 60.0 if cls is Broken else 1.0
    try:
        await wait_ready([actor], timeout_s=limit)
    except AsyncPolicyError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


async def report(cluster: Cluster) -> dict[str, JsonValue]:
    """Use everything once."""
    from ray import exceptions  # noqa: PLC0415 -- not before local_cluster

    actor = cluster.actor("counter", environment={"COLOUR": "red"}).start(Counter, 40)
    impatient = cluster.actor("impatient", call_timeout_s=0.5).start(Counter, start=0)
    await wait_ready([actor, impatient], timeout_s=120.0)
    seen: dict[str, JsonValue] = {}
    seen["actor variable"] = await actor.call(Counter.variable, "COLOUR")
    seen["cluster variable"] = await actor.call(Counter.variable, "SIZE")
    seen["other actor's variable"] = await impatient.call(Counter.variable, "COLOUR")
    total = await actor.call(Counter.add, number=2)
    seen["sum"] = assert_type(total, int)
    seen["refuse"] = await error_of(actor, "refuse")
    seen["wrong type"] = await error_of(actor, "wrong type")
    seen["impatient"] = await error_of(impatient, "wait")

    for name, limit in (("narrow", 1), ("wide", None)):
        asked = cluster.actor(name, num_cpus=0.0, max_calls=limit).start(Counter, 0)
        await wait_ready([asked], timeout_s=60.0)
        busy = asyncio.create_task(asked.call(Counter.wait))
        await asyncio.sleep(0.2)
        second = asyncio.create_task(asked.call(Counter.process))
        answered, _ = await asyncio.wait({second}, timeout=60.0 if limit is None else 0.5)
        seen[f"{name}: the second call is answered beside the first"] = bool(answered)
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        await second

    waiting = asyncio.create_task(actor.call(Counter.wait))
    await asyncio.sleep(0.2)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    for _ in range(100):
        if await actor.call(Counter.was_cancelled):
            break
        await asyncio.sleep(0.05)
    seen["cancelled in the actor"] = await actor.call(Counter.was_cancelled)

    seen["child"] = await impatient.call(Counter.start_child)
    seen["processes"] = descendants(os.getpid())
    seen["listening"] = listening_addresses([os.getpid(), *descendants(os.getpid())])

    seen["descriptions"] = [
        describe_failure(error, actor="trainer", method="step")
        for error in (
            exceptions.OutOfMemoryError("7 of 8 GB were used"),  # type: ignore[no-untyped-call]
            exceptions.RuntimeEnvSetupError("no such package"),
            exceptions.ActorUnavailableError("the network is down", None),
            exceptions.TaskCancelledError(error_message="it was cancelled"),
        )
    ]

    victim = await actor.call(Counter.process)
    dying = asyncio.create_task(error_of(actor, "complain"))
    await asyncio.sleep(0.5)
    os.kill(victim, signal.SIGKILL)
    seen["killed"] = await dying
    seen["called after its death"] = await error_of(actor, "refuse")
    seen["broken"] = await not_ready(cluster, "broken", Broken)
    seen["slow"] = await not_ready(cluster, "slow", Slow)
    return seen


async def wait_for_a_signal(cluster: Cluster, path: Path) -> None:
    """Say which processes there are, then wait."""
    actor = cluster.actor("counter").start(Counter, 0)
    await wait_ready([actor], timeout_s=120.0)
    write_json(path, {"processes": descendants(os.getpid())})
    await asyncio.Event().wait()


def main() -> None:
    """Run the mode that the command line names."""
    mode, path = sys.argv[1], Path(sys.argv[2])
    with local_cluster(
        num_cpus=2,
        environment={"SIZE": "large", "COLOUR": "blue"},
        object_store_bytes=OBJECT_STORE_BYTES,
        keep_logs_in=path.parent / "logs",
    ) as cluster:
        if mode == "report":
            write_json(path, asyncio.run(report(cluster)))
        else:
            asyncio.run(wait_for_a_signal(cluster, path))


if __name__ == "__main__":
    main()
