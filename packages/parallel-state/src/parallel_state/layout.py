"""Where each rank sits on every axis, by arithmetic alone: no torch, no process group.

| axis | ranks of one group differ in |
| --- | --- |
| `pipeline`, `dp_replicate`, `dp_shard`, `ulysses`, `tensor` | that degree alone |
| `fsdp` | dp_shard and ulysses: they hold the shards of one copy of the dense parameters |
| `data` | dp_replicate, dp_shard and ulysses: their tokens together are the batch |
| an extra axis such as `ep` | that axis alone, within one `fsdp` group |
| its complement such as `ep_fsdp` | the rest of that `fsdp` group |

The parts of an axis are neighbours in the grid, so the ranks of a group are evenly spaced: an axis
is a size and the step between two ranks of a group.
"""

from parallel_state.sizes import AxisT, check_int, unknown_axis
from parallel_state.state import DENSE_AXES, FLAT_AXES, ParallelState


def axis_names(state: ParallelState[AxisT]) -> tuple[str, ...]:
    """Every axis of `state`: the dense ones, `fsdp`, `data`, each extra axis and its complement."""
    extra = [name for axis in state.extra_parallel_sizes for name in (str(axis), f"{axis}_fsdp")]
    return (*DENSE_AXES, *FLAT_AXES, *extra)


def rank_coordinates(state: ParallelState[AxisT], rank: int) -> dict[str, int]:
    """Index of `rank` on every axis of `axis_names`.

    Raises:
        TypeError: if `rank` is no int.
        ValueError: if `state` has no such rank.
    """
    check_int("rank_coordinates: rank", rank)
    if not 0 <= rank < state.world_size:
        message = f"rank {rank} is outside of a world of {state.world_size} ranks"
        raise ValueError(message)
    return {name: rank // step % size for name, (size, step) in _sizes_and_steps(state).items()}


def axis_groups(state: ParallelState[AxisT], name: str) -> tuple[tuple[int, ...], ...]:
    """Ranks of every group on axis `name`, each in the order of their index on it.

    Raises:
        UnknownAxisError: if `state` has no such axis.
    """
    names = axis_names(state)
    if name not in names:
        raise unknown_axis(name, names, where="this ParallelState")
    size, step = _sizes_and_steps(state)[name]
    span = size * step
    return tuple(
        tuple(range(first, first + span, step))
        for block in range(0, state.world_size, span)
        for first in range(block, block + step)
    )


def _sizes_and_steps(state: ParallelState[AxisT]) -> dict[str, tuple[int, int]]:
    """Size of every axis of `axis_names`, and the step between the ranks of its groups."""
    found: dict[str, tuple[int, int]] = {}
    step = 1
    for name, size in reversed(state.dense_sizes.items()):
        found[name] = size, step
        step *= size
    found["fsdp"] = state.fsdp_size, state.tensor_size
    found["data"] = state.data_size, state.tensor_size
    for axis, size in state.extra_parallel_sizes.items():
        found[str(axis)] = size, state.tensor_size
        found[f"{axis}_fsdp"] = state.extra_fsdp_size(axis), state.tensor_size * size
    return {name: found[name] for name in axis_names(state)}
