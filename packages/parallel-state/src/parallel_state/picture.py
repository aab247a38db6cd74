"""A layout as text: which rank sits where on every axis, and which groups it is in."""

import textwrap
from collections.abc import Sequence

from parallel_state.layout import axis_groups, axis_names, rank_coordinates
from parallel_state.sizes import AxisT
from parallel_state.state import ParallelState

_WIDTH = 100
"""Columns of a line; the table of ranks may be wider."""

MOST_RANKS = 2**17
"""Ranks of the largest picture, which has a line for each: 131,072."""

_SHORTEST_RANGE = 3
"""Fewer ranks than this are written out."""


def layout_picture(state: ParallelState[AxisT]) -> str:
    """Draw `state`: the degrees, a table with a line per rank, and the groups of every axis.

    Axes of size 1 are left out: on them every rank is alone. The ranks of a group are evenly
    spaced: from three on they are written `first-last`, and `first-last:step` for other steps
    than 1.

    Raises:
        ValueError: for a world of more than `MOST_RANKS` ranks.
    """
    if state.world_size > MOST_RANKS:
        message = (
            f"a picture has a line for each rank, at most {MOST_RANKS} of them, got a world of "
            f"{state.world_size}; rank_coordinates says where one rank sits"
        )
        raise ValueError(message)
    groups = {name: axis_groups(state, name) for name in axis_names(state)}
    groups = {name: found for name, found in groups.items() if len(found[0]) > 1}
    lines = [_title(state)]
    if not groups:
        return "\n".join([*lines, "every rank is alone on every axis", ""])
    header = ["rank", *groups]
    widths = [max(len(name), len(str(state.world_size - 1))) for name in header]
    lines += ["", _row(header, widths)]
    for rank in range(state.world_size):
        coordinates = rank_coordinates(state, rank)
        cells = [rank, *(coordinates[name] for name in groups)]
        lines.append(_row([str(cell) for cell in cells], widths))
    lines += ["", "groups"]
    label = max(len(name) for name in groups)
    shape = max(len(_shape(found)) for found in groups.values())
    for name, found in groups.items():
        start = f"  {name:<{label}}  {_shape(found):<{shape}}  "
        lines += textwrap.wrap(
            "  ".join(_ranks(group) for group in found),
            width=_WIDTH,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_on_hyphens=False,
        )
    return "\n".join([*lines, ""])


def _title(state: ParallelState[AxisT]) -> str:
    used = [f"{name} {size}" for name, size in state.dense_sizes.items() if size > 1]
    parts = [f"{state.world_size} ranks = {' x '.join(used) or 1}"]
    parts += [
        f"fsdp {state.fsdp_size} = {axis}_fsdp {state.extra_fsdp_size(axis)} x {axis} {size}"
        for axis, size in state.extra_parallel_sizes.items()
        if size > 1
    ]
    return "; ".join(parts)


def _shape(groups: Sequence[Sequence[int]]) -> str:
    return f"{len(groups)} of {len(groups[0])}"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _ranks(group: Sequence[int]) -> str:
    # The axes of a group are neighbours in the grid, so its ranks are evenly spaced.
    if len(group) < _SHORTEST_RANGE:
        return ",".join(map(str, group))
    step = group[1] - group[0]
    return f"{group[0]}-{group[-1]}" + ("" if step == 1 else f":{step}")
