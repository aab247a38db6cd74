"""The only module that writes or reads VeOmni's parallel state.

VeOmni keeps the state of a process in a global that its model code asks. `init_parallel_state`
hands the first one back to whoever asks again under the same name, whatever they ask for, and its
keywords change between releases. So: `parallel_state.veomni` writes the keywords for the installed
signature and reads back what came, groups included, and each engine enters its own state around
every call into VeOmni.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, final

import torch.distributed as dist

from parallel_state import ParallelState
from parallel_state.veomni import from_veomni, to_veomni_kwargs


class _RawState(Protocol):
    """What is read of VeOmni's own state (upstream: `distributed/parallel_state.py`, 0.1.12)."""

    ep_group: dist.ProcessGroup
    ep_enabled: bool
    ulysses_group: dist.ProcessGroup | None
    device_type: str


@final
class VeomniState:
    """VeOmni's parallel state of one engine, entered around every call into VeOmni."""

    def __init__(self, state: ParallelState, *, device_type: str) -> None:
        """Build the meshes; every rank of the world takes part.

        Raises:
            ValueError: if the world has another size than the degrees.
            RuntimeError: if VeOmni hands back a state of another topology.
        """
        state.check_world(dist.get_world_size())
        from veomni.distributed.parallel_state import init_parallel_state  # noqa: PLC0415

        self._raw: _RawState = init_parallel_state(
            **to_veomni_kwargs(
                state,
                device_type=device_type,
                signature=inspect.signature(init_parallel_state),
            )
        )
        self._state = from_veomni(self._raw).state
        asked, got = (state, device_type), (self._state, self._raw.device_type)
        if got != asked:
            message = (
                f"engine-veomni: asked VeOmni for {asked}, got {got}: the state of another engine"
            )
            raise RuntimeError(message)

    @property
    def ep_size(self) -> int:
        """Ranks that the experts of a layer are spread over."""
        return self._state.extra_parallel_sizes["ep"]

    @property
    def ep_group(self) -> dist.ProcessGroup | None:
        """Process group of those ranks; None without expert parallelism."""
        return self._raw.ep_group if self._raw.ep_enabled else None

    @property
    def ulysses_group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks that share every sequence; None where none do."""
        return self._raw.ulysses_group if self._state.ulysses_size > 1 else None

    @property
    def ep_fsdp_size(self) -> int:
        """Ranks that one rank's share of the experts is sharded over, replicas not counted."""
        return self._state.extra_fsdp_size("ep")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the state that VeOmni's code asks, and put back the one before."""
        from veomni.distributed.parallel_state import use_parallel_state  # noqa: PLC0415

        with use_parallel_state(self._raw):
            yield
