"""The only module that writes or reads VeOmni's parallel state.

VeOmni keeps the state of a process in a global that its model code asks. `init_parallel_state`
hands the first one back to whoever asks again under the same name, whatever they ask for, and its
keywords change between releases. So: the keywords are checked against its signature, the name is
left out, what comes back is compared with what was asked for, and each engine enters its own state
around every call into VeOmni.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, final

import torch.distributed as dist

from parallel_state import ParallelState

KeywordValue = int | str | bool | None | tuple[int, ...] | tuple[bool, ...] | tuple[str, ...]
"""What VeOmni's `init_parallel_state` takes."""


class _RawState(Protocol):
    """What is read of VeOmni's own state (upstream: `distributed/parallel_state.py`, 0.1.12)."""

    extra_parallel_sizes: dict[str, int]
    ep_group: dist.ProcessGroup
    ep_enabled: bool
    dp_size: int
    dp_replicate_size: int
    dp_shard_size: int
    ulysses_size: int
    device_type: str

    def extra_parallel_fsdp_size(self, para_name: str) -> int: ...


def to_veomni_kwargs(
    state: ParallelState,
    *,
    device_type: str,
    signature: inspect.Signature | None = None,
) -> dict[str, KeywordValue]:
    """Translate our state into the keywords of VeOmni's `init_parallel_state`.

    Args:
        state: ours.
        device_type: `cpu`.
        signature: of the function to call; None asks the installed VeOmni.

    Raises:
        TypeError: if the function does not name one of the keywords.
    """
    sizes = state.extra_parallel_sizes.as_dict()
    kwargs: dict[str, KeywordValue] = {
        "dp_size": state.dp_size,
        "dp_replicate_size": state.dp_replicate_size,
        "dp_shard_size": state.dp_shard_size,
        "ulysses_size": state.ulysses_size,
        "tp_size": state.tensor_size,
        "pp_size": state.pipeline_size,
        "dp_mode": "fsdp2",
        "device_type": device_type,
        # tuples: the function takes them and stores a dict
        "extra_parallel_sizes": tuple(sizes.values()),
        "extra_parallel_names": tuple(sizes),
        "extra_parallel_placement_innermost": (False,) * len(sizes),
        "name": None,
    }
    if signature is None:
        from veomni.distributed.parallel_state import init_parallel_state  # noqa: PLC0415

        signature = inspect.signature(init_parallel_state)
    check_keywords(kwargs, signature)
    return kwargs


def check_keywords(kwargs: Mapping[str, object], signature: inspect.Signature) -> None:
    """Refuse a keyword that the function does not name, even if it would swallow it.

    Raises:
        TypeError: with the keywords that are unknown and those that are known.
    """
    known = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if unknown := sorted(set(kwargs) - set(known)):
        message = (
            f"engine-veomni: VeOmni's init_parallel_state does not know {', '.join(unknown)}; "
            f"it knows {', '.join(known)}: this release has another shape than the tested ones"
        )
        raise TypeError(message)


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
            **to_veomni_kwargs(state, device_type=device_type)
        )
        self._check(state, device_type)

    @property
    def ep_size(self) -> int:
        """Ranks that the experts of a layer are spread over."""
        return self._raw.extra_parallel_sizes["ep"]

    @property
    def ep_group(self) -> dist.ProcessGroup | None:
        """Process group of those ranks; None without expert parallelism."""
        return self._raw.ep_group if self._raw.ep_enabled else None

    @property
    def ep_fsdp_size(self) -> int:
        """Ranks that one rank's share of the experts is sharded over, replicas not counted."""
        fsdp_size = self._raw.dp_shard_size * self._raw.ulysses_size
        return fsdp_size // self.ep_size

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the state that VeOmni's code asks, and put back the one before."""
        from veomni.distributed.parallel_state import use_parallel_state  # noqa: PLC0415

        with use_parallel_state(self._raw):
            yield

    def _check(self, state: ParallelState, device_type: str) -> None:
        asked = {
            "extra_parallel_sizes": state.extra_parallel_sizes.as_dict(),
            "dp_size": state.dp_size,
            "dp_replicate_size": state.dp_replicate_size,
            "dp_shard_size": state.dp_shard_size,
            "ulysses_size": state.ulysses_size,
            "device_type": device_type,
        }
        got = {name: getattr(self._raw, name) for name in asked}
        if got != asked:
            message = (
                f"engine-veomni: asked VeOmni for {asked}, got {got}: the state of another engine"
            )
            raise RuntimeError(message)
