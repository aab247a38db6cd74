"""A rank that waits says for whom."""

import datetime as dt
from typing import final

import torch.distributed as dist

from rl_contracts.rollout import PolicyVersion


def require_process_group(who: str) -> None:
    """Refuse to begin without torch.distributed.

    Raises:
        RuntimeError: if it is not initialised.
    """
    if not dist.is_initialized():
        message = (
            f"{who}: torch.distributed is not initialised; call "
            "parallel_state.process_group.init_process_group() first, also for one process"
        )
        raise RuntimeError(message)


@final
class RollCall:
    """Where all ranks meet before the collectives of a call, so that one that is missing is named.

    A collective that waits tells nobody for whom, and on GPUs it ends the process. This costs one
    short message per rank and call, over gloo.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """Make the group; called on every rank.

        Args:
            timeout_s: how long to wait for the others, in seconds.
        """
        self._timeout_s = timeout_s
        self._group = dist.new_group(backend="gloo", timeout=dt.timedelta(seconds=timeout_s))

    def answer(self, method: str, *, policy_version: PolicyVersion) -> None:
        """Return when all ranks are here.

        Raises:
            TimeoutError: if one does not come, or is gone; rank 0 names all that are missing.
        """
        if dist.get_world_size() == 1:
            return
        try:
            dist.monitored_barrier(
                self._group,
                timeout=dt.timedelta(seconds=self._timeout_s),
                wait_all_ranks=True,
            )
        except RuntimeError as error:
            rank = dist.get_rank()
            whom = (
                "the ranks named below"
                if rank == 0
                else "rank 0, which names those that it waited for, or is itself the one missing"
            )
            message = (
                f"{method}: rank {rank}, at policy version {policy_version}, waited up to "
                f"{self._timeout_s} s for {whom}. Every rank calls the same methods in the same "
                f"order; look at the log of the missing one: {error}"
            )
            raise TimeoutError(message) from error
