"""Starting torch.distributed, with a store that stays on this machine and a finite timeout."""

import datetime as dt

import torch.distributed as dist


def init_process_group(
    *,
    rank: int = 0,
    world_size: int = 1,
    init_method: str | None = None,
    backend: str = "gloo",
    timeout_s: float = 600.0,
) -> None:
    """Initialise torch.distributed for the engines of this process.

    End it with `torch.distributed.destroy_process_group`.

    Args:
        rank: this process among `world_size`.
        world_size: processes in all.
        init_method: where the processes meet: ``file:///new/file`` on a disk that all see, or
            ``tcp://127.0.0.1:port``. One process alone needs none, and then opens no port.
        backend: ``gloo`` on CPUs, ``nccl`` on GPUs.
        timeout_s: a collective that waits longer for another rank raises, in seconds.

    Raises:
        ValueError: if several processes are given no place to meet, or `rank` is none of them.
        RuntimeError: if torch.distributed is initialised already, or the ranks do not meet.
    """
    if not 0 <= rank < world_size:
        message = f"init_process_group: expected a rank from 0 to {world_size - 1}, got {rank}"
        raise ValueError(message)
    if timeout_s <= 0:
        message = f"init_process_group: expected a timeout above 0 seconds, got {timeout_s}"
        raise ValueError(message)
    if dist.is_initialized():
        message = (
            f"init_process_group: torch.distributed is initialised already, with "
            f"{dist.get_world_size()} ranks over {dist.get_backend()}; destroy that group first, "
            "or use it"
        )
        raise RuntimeError(message)
    timeout = dt.timedelta(seconds=timeout_s)
    if init_method is not None:
        try:
            dist.init_process_group(
                backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
            )
        except RuntimeError as error:
            message = (
                f"init_process_group: rank {rank} waited for the other {world_size - 1} ranks at "
                f"{init_method} for up to {timeout_s} s: {error}"
            )
            raise RuntimeError(message) from error
        return
    if world_size > 1:
        message = (
            f"init_process_group: {world_size} processes need an init_method to meet at, such as "
            "file:///tmp/new_file or tcp://127.0.0.1:29500; got None"
        )
        raise ValueError(message)
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but missing from the stubs
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
