"""Tensors that belong together have one shape; broadcasting would make a wrong number of others."""

from torch import Tensor


def check_one_shape(where: str, **tensors: Tensor) -> None:
    """Refuse tensors whose shapes differ; reads no values.

    Raises:
        ValueError: with the name and the shape of each.
    """
    first = next(iter(tensors.values()))
    if any(tensor.shape != first.shape for tensor in tensors.values()):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{where}: expected tensors of one shape, got {shapes}")
