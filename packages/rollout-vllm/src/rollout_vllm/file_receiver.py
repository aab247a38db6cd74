"""The receiving half of published files: safetensors, in shared memory or on a disk."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from safetensors import safe_open

from rollout_vllm.copy_plan import Piece
from rollout_vllm.headers import TensorHeader, read_headers


def published_headers(instructions: Mapping[str, object]) -> dict[str, TensorHeader]:
    """Headers of all weights in the files."""
    return read_headers(Path(path) for path in cast("list[str]", instructions["paths"]))


def published_pieces(instructions: Mapping[str, object]) -> Iterator[list[Piece]]:
    """Every tensor as a whole, one after the other."""
    for path in cast("list[str]", instructions["paths"]):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                tensor = file.get_tensor(name)
                yield [Piece(name, tensor, 0, tensor.shape[0] if tensor.ndim else 1)]
