"""Resources of one node, set aside for the ranks of one engine."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from async_policy.actor_spec import ActorSpec, Cluster, checked_environment
from async_policy.errors import ClusterError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


@final
class Reservation:
    """Resources for several actors that must be on one node. Made by `reserve`."""

    def __init__(
        self, cluster: Cluster, group: "PlacementGroup", *, num_ranks: int, num_cpus: float,
        num_gpus: float,
    ) -> None:  # fmt: skip
        """Wrap ray's placement group, one bundle for each rank."""
        self._cluster = cluster
        self._group = group
        self.num_ranks = num_ranks
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus

    def actor(
        self,
        name: str,
        *,
        rank: int,
        environment: Mapping[str, str] | None = None,
        call_timeout_s: float = 600.0,
    ) -> ActorSpec:
        """Say how the actor of a rank shall run, with the resources of that rank.

        Args:
            name: names the actor in every message; unique in the cluster.
            rank: from 0.
            environment: environment variables, beside and above those of the cluster.
            call_timeout_s: seconds that a call may take.

        Raises:
            ValueError: if there is no such rank.
        """
        from ray.util.scheduling_strategies import (  # noqa: PLC0415 -- an extra
            PlacementGroupSchedulingStrategy,
        )

        if not 0 <= rank < self.num_ranks:
            message = f"actor '{name}': expected a rank from 0 to {self.num_ranks - 1}, got {rank}"
            raise ValueError(message)
        return ActorSpec(
            self._cluster,
            name,
            num_cpus=self._num_cpus,
            num_gpus=self._num_gpus,
            environment=checked_environment(environment),
            call_timeout_s=call_timeout_s,
            strategy=PlacementGroupSchedulingStrategy(self._group, rank),
        )

    def release(self) -> None:
        """Give the resources back; actors that still run there are ended."""
        from ray.util import remove_placement_group  # noqa: PLC0415 -- an extra

        remove_placement_group(self._group)


def reserve(
    cluster: Cluster,
    name: str,
    *,
    num_ranks: int,
    num_cpus: float,
    num_gpus: float = 0.0,
    timeout_s: float = 60.0,
) -> Reservation:
    """Set resources aside on one node, for ranks that talk to each other all the time.

    Args:
        cluster: where.
        name: names them in messages.
        num_ranks: actors.
        num_cpus: CPUs of each rank.
        num_gpus: GPUs of each rank.
        timeout_s: seconds to wait until a node has that much free.

    Raises:
        ValueError: without a rank, or without a resource that a rank could hold.
        ClusterError: if no node has; names what was asked for and what each node has free.
    """
    if num_ranks < 1 or min(num_cpus, num_gpus) < 0 or not num_cpus + num_gpus:
        message = (
            f"reserve '{name}': expected at least one rank with CPUs or GPUs, got {num_ranks} with "
            f"{num_cpus:g} CPUs and {num_gpus:g} GPUs each"
        )
        raise ValueError(message)
    from ray.util import placement_group, remove_placement_group  # noqa: PLC0415 -- an extra

    bundle = {"CPU": num_cpus} | ({"GPU": num_gpus} if num_gpus else {})
    group = placement_group([bundle] * num_ranks, strategy="STRICT_PACK", name=name)
    try:
        is_there = group.wait(timeout_s)
    except BaseException:  # a Ctrl-C meanwhile must not leave the resources taken
        remove_placement_group(group)
        raise
    if not is_there:
        remove_placement_group(group)
        nodes = "; ".join(
            f"{node.name} has {node.num_cpus:g} CPUs and {node.num_gpus:g} GPUs in all"
            for node in cluster.nodes()
        )
        message = (
            f"waited {timeout_s:g} s for one node with {num_ranks} x {num_cpus:g} CPUs and "
            f"{num_ranks} x {num_gpus:g} GPUs free for '{name}'; {nodes}"
        )
        raise ClusterError(message)
    return Reservation(cluster, group, num_ranks=num_ranks, num_cpus=num_cpus, num_gpus=num_gpus)
