"""Advantages of a whole batch brought to mean 0 and variance 1.

Several methods end in this step (REINFORCE++, GDPO, PPO's custom). It looks at everything that
one optimizer step looks at, on all ranks, so it is done once, where rewards become advantages,
and never per micro-batch.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from algos_gspo_dapo_grpo.shapes import check_one_shape

WHITENING_EPSILON = 1e-8
"""Added to the variance. verl's value (verl/utils/torch_functional.py, ``masked_whiten``)."""


def whitened(
    values: Float[Tensor, "*units"], weights: Float[Tensor, "*units"]
) -> Float[Tensor, "*units"]:
    """``(value - mean) / sqrt(variance + 1e-8)``, with weighted mean and variance.

    Args:
        values: to be whitened; finite wherever the weight is not 0.
        weights: how often each value counts: 1 and 0 for a mask over tokens, or tokens per
            sample.

    Returns:
        Whitened values, and 0 where the weight is 0. The variance has the divisor ``total weight
        - 1``. A total weight of 1 or less, or values that are all equal, gives 0.
    """
    check_one_shape("whitened", values=values, weights=weights)
    counted = weights > 0
    values = torch.where(counted, values, 0.0)
    total = weights.sum()
    # Measured from the lowest value, so that equal values are exact zeros.
    lowest = torch.where(counted, values, torch.inf).reshape(-1)
    lowest = torch.cat([lowest, lowest.new_full((1,), torch.inf)]).amin()
    above = torch.where(counted, values - lowest, 0.0)
    centred = torch.where(
        counted, above - (weights * above).sum() / torch.where(total > 0, total, 1.0), 0.0
    )
    variance = (weights * centred.square()).sum() / (total - 1.0).clamp(min=1.0)
    return centred * torch.rsqrt(variance + WHITENING_EPSILON)
