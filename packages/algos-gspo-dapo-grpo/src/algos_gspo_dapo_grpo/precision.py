"""The dtype that formulas run in: float32, or the input's own if that is finer."""

import torch
from jaxtyping import Float
from torch import Tensor


def at_least_float32(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Widen bfloat16 and float16 to float32; leave float32 and float64 as they are.

    A ratio near 1 needs more than the 8 bits of bfloat16: GSPO clips at 3e-4.
    """
    return values.to(torch.promote_types(values.dtype, torch.float32))
