"""What runs where in a cluster: names, resources, environments, nodes."""

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, final

from async_policy.errors import ClusterError
from async_policy.ray_actor import Actor

R = TypeVar("R")
T = TypeVar("T")
P = ParamSpec("P")


@final
class ActorSpec:
    """Name, resources and environment of an actor that is about to start."""

    def __init__(
        self,
        cluster: "Cluster",
        name: str,
        *,
        num_cpus: float,
        num_gpus: float,
        environment: Mapping[str, str],
        call_timeout_s: float,
        strategy: object = "DEFAULT",
        max_calls: int | None = None,
    ) -> None:
        """Made by `Cluster.actor` and `Reservation.actor`; `strategy` is ray's, for the place."""
        self._cluster = cluster
        self._name = name
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._environment = environment
        self._call_timeout_s = call_timeout_s
        self._strategy = strategy
        self._max_calls = max_calls

    def start(self, cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Actor[T]:
        """Build ``cls(*args, **kwargs)`` in a process of its own.

        Returns at once; `wait_ready` waits for the constructor. The class reaches the process
        under its module's name, or by value if it stands in the script that was started.

        Raises:
            TypeError: if `cls` is not a class.
            ValueError: if the name is taken, or the cluster has not enough CPUs or GPUs left:
                ray would let the actor wait for ever.
        """
        import ray  # noqa: PLC0415 -- an extra

        if not isinstance(cls, type):
            message = f"start: expected a class for actor '{self._name}', got {cls!r}"
            raise TypeError(message)
        ray_name = self._cluster.claim(self._name, num_cpus=self._num_cpus, num_gpus=self._num_gpus)
        handle: object = (
            ray.remote(cls)
            .options(
                name=ray_name,
                num_cpus=self._num_cpus,
                num_gpus=self._num_gpus,
                scheduling_strategy=self._strategy,
                **({} if self._max_calls is None else {"max_concurrency": self._max_calls}),
                runtime_env={"env_vars": {**self._cluster.environment, **self._environment}},
            )
            .remote(*args, **kwargs)
        )
        return Actor(
            self._name,
            cls,
            handle,
            call_timeout_s=self._call_timeout_s,
            log_folder=self._cluster.log_folder,
            release=functools.partial(self._cluster.release, self._name),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine of the cluster, or what ray takes for one."""

    name: str
    """Its address, and the beginning of ray's id, since several may share an address."""

    node_id: str
    """Ray's id."""

    num_cpus: float
    """CPUs that it has for actors, in all."""

    num_gpus: float
    """GPUs that it has for actors, in all."""


@final
class Cluster:
    """The running cluster. Made by `local_cluster` or `connect`."""

    def __init__(
        self,
        *,
        num_cpus: float,
        num_gpus: float,
        environment: Mapping[str, str],
        log_folder: Path,
        elastic: bool = False,
    ) -> None:
        """Describe what there is; `elastic` where nodes may come and go, so ray is asked."""
        self.environment = dict(environment)
        self.log_folder = log_folder
        self._total = {"CPUs": float(num_cpus), "GPUs": float(num_gpus)}
        self._elastic = elastic
        self._claims: dict[str, dict[str, float]] = {}
        self._num_starts: Counter[str] = Counter()

    def actor(
        self,
        name: str,
        *,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        environment: Mapping[str, str] | None = None,
        call_timeout_s: float = 600.0,
        max_calls: int | None = None,
    ) -> ActorSpec:
        """Say how an actor shall run; `ActorSpec.start` starts it.

        Args:
            name: names the actor in every message; unique in the cluster.
            num_cpus: CPUs that ray sets aside for it. Unless the environment says otherwise, ray
                sets ``OMP_NUM_THREADS`` to this number.
            num_gpus: GPUs that ray sets aside for it and makes visible to it.
            environment: environment variables, beside and above those of the cluster.
            call_timeout_s: seconds that a call may take, the time that it waits for others
                included.
            max_calls: calls that run at a time; others wait, questions after its health too.
                Default: ray's, 1000 for a class with coroutines and 1 for others, where more would
                run in threads.

        Raises:
            ValueError: if not even one call could run.
        """
        if max_calls is not None and max_calls < 1:
            message = f"actor '{name}': expected max_calls of at least 1, got {max_calls}"
            raise ValueError(message)
        return ActorSpec(
            self,
            name,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            environment=checked_environment(environment),
            call_timeout_s=call_timeout_s,
            max_calls=max_calls,
        )

    def claim(self, name: str, *, num_cpus: float, num_gpus: float) -> str:
        """Set resources aside for an actor.

        Returns:
            the name for ray, which knows the name of a stopped actor for a while yet.

        Raises:
            ValueError: if the name is taken, or there is not enough left.
        """
        if name in self._claims:
            message = f"actor '{name}' exists already; names are unique in a cluster"
            raise ValueError(message)
        if self._elastic:
            nodes = self.nodes()
            self._total["CPUs"] = sum(node.num_cpus for node in nodes)
            self._total["GPUs"] = sum(node.num_gpus for node in nodes)
        wanted = {"CPUs": num_cpus, "GPUs": num_gpus}
        for kind, amount in wanted.items():
            left = self._total[kind] - sum(claim[kind] for claim in self._claims.values())
            if amount > left:
                message = (
                    f"actor '{name}' asks for {amount:g} {kind}, the cluster has {left:g} of "
                    f"{self._total[kind]:g} left; ask for less, or give local_cluster more"
                )
                raise ValueError(message)
        self._claims[name] = wanted
        self._num_starts[name] += 1
        times = self._num_starts[name]
        return name if times == 1 else f"{name}, start {times}"

    def release(self, name: str) -> None:
        """Free the name and the resources of an actor that was stopped."""
        del self._claims[name]

    def nodes(self) -> tuple[Node, ...]:
        """The nodes that are alive."""
        import ray  # noqa: PLC0415 -- an extra

        found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return tuple(
            Node(
                name=f"{node['NodeManagerAddress']}/{node['NodeID'][:8]}",
                node_id=node["NodeID"],
                num_cpus=node["Resources"].get("CPU", 0.0),
                num_gpus=node["Resources"].get("GPU", 0.0),
            )
            for node in found
            if node["Alive"]
        )

    async def on_each_node(
        self, function: Callable[[], R], *, timeout_s: float = 120.0
    ) -> dict[str, R]:
        """Run a function in a worker process of every node, with the cluster's environment.

        To look at what is there before a run relies on it: `device_env.collect` in each, and then
        `device_env.compare`, names the nodes whose environment differs.

        Returns:
            what it returned, by `Node.name`.

        Raises:
            ClusterError: if it failed on a node, or a node did not answer; names them.
        """
        import ray  # noqa: PLC0415 -- an extra
        from ray.exceptions import RayError  # noqa: PLC0415
        from ray.util.scheduling_strategies import (  # noqa: PLC0415
            NodeAffinitySchedulingStrategy,
        )

        nodes = self.nodes()
        task = ray.remote(num_cpus=0)(function)
        runtime_env = {"env_vars": dict(self.environment)}

        async def ask(node: Node) -> R:
            reference = task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
                runtime_env=runtime_env,
            ).remote()
            try:
                async with asyncio.timeout(timeout_s):
                    return await reference
            except TimeoutError:
                message = f"node {node.name} did not answer within {timeout_s:g} s"
                raise ClusterError(message) from None
            except RayError as error:
                lines = str(error).strip().splitlines()
                raise ClusterError(f"node {node.name}: {lines[-1]}") from error

        answers = await asyncio.gather(*map(ask, nodes))
        return {node.name: answer for node, answer in zip(nodes, answers, strict=True)}


def checked_environment(environment: Mapping[str, str] | None) -> dict[str, str]:
    """A copy; environment variables are text, and ray's message on others names no variable."""
    checked = dict(environment or {})
    for name, value in checked.items():
        if not isinstance(value, str):
            message = f"environment: expected text for {name}, got {value!r}; write '{value}'"
            raise TypeError(message)
    return checked
