"""Degrees, axes and device meshes of a distributed run as frozen, fully typed values."""

from parallel_state.layout import axis_groups, axis_names, rank_coordinates
from parallel_state.sizes import AxisT, ExtraParallelSizes, UnknownAxisError
from parallel_state.state import ParallelState

__all__ = [
    "AxisT",
    "ExtraParallelSizes",
    "ParallelState",
    "UnknownAxisError",
    "axis_groups",
    "axis_names",
    "rank_coordinates",
]
