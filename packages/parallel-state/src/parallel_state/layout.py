"""Where each rank sits on every axis, by arithmetic alone: no torch, no process group.

| axis | ranks of one group differ in |
| --- | --- |
| `pipeline`, `dp_replicate`, `dp_shard`, `ulysses`, `tensor` | that degree alone |
| `fsdp` | dp_shard and ulysses: they hold the shards of one copy of the dense parameters |
| `data` | dp_replicate, dp_shard and ulysses: their tokens together are the batch |
| an extra axis such as `ep` | that axis alone, within one `fsdp` group |
| its complement such as `ep_fsdp` | the rest of that `fsdp` group |
"""

from parallel_state.sizes import AxisT, unknown_axis
from parallel_state.state import DENSE_AXES, FLAT_AXES, ParallelState

_FLAT = {"fsdp": ("dp_shard", "ulysses"), "data": ("dp_replicate", "dp_shard", "ulysses")}


def axis_names(state: ParallelState[AxisT]) -> tuple[str, ...]:
    """Every axis of `state`: the dense ones, `fsdp`, `data`, each extra axis and its complement."""
    extra = [name for axis in state.extra_parallel_sizes for name in (str(axis), f"{axis}_fsdp")]
    return (*DENSE_AXES, *FLAT_AXES, *extra)


def rank_coordinates(state: ParallelState[AxisT], rank: int) -> dict[str, int]:
    """Index of `rank` on every axis of `axis_names`.

    Raises:
        ValueError: if `state` has no such rank.
    """
    if not 0 <= rank < state.world_size:
        message = f"rank {rank} is outside of a world of {state.world_size} ranks"
        raise ValueError(message)
    sizes = state.dense_sizes
    coordinates: dict[str, int] = {}
    rest = rank
    for name in reversed(DENSE_AXES):
        rest, coordinates[name] = divmod(rest, sizes[name])
    for name, parts in _FLAT.items():
        index = 0
        for part in parts:
            index = index * sizes[part] + coordinates[part]
        coordinates[name] = index
    for axis, size in state.extra_parallel_sizes.items():
        coordinates[f"{axis}_fsdp"], coordinates[axis] = divmod(coordinates["fsdp"], size)
    return {name: coordinates[name] for name in axis_names(state)}


def axis_groups(state: ParallelState[AxisT], name: str) -> tuple[tuple[int, ...], ...]:
    """Ranks of every group on axis `name`, each in the order of their index on it.

    Raises:
        UnknownAxisError: if `state` has no such axis.
    """
    names = axis_names(state)
    if name not in names:
        raise unknown_axis(name, names, where="this ParallelState")
    # What two ranks of one group have in common: everything that the axis is not made of.
    if name in DENSE_AXES or name in FLAT_AXES:
        parts = _FLAT.get(name, (name,))
        common = [dense for dense in DENSE_AXES if dense not in parts]
    else:
        complement = {str(axis): f"{axis}_fsdp" for axis in state.extra_parallel_sizes}
        complement |= {twin: axis for axis, twin in complement.items()}
        common = ["pipeline", "dp_replicate", "tensor", complement[name]]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(state.world_size):
        coordinates = rank_coordinates(state, rank)
        groups.setdefault(tuple(coordinates[key] for key in common), []).append(rank)
    return tuple(tuple(ranks) for ranks in groups.values())
