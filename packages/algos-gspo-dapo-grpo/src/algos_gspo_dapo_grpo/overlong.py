"""Soft punishment of completions that come close to the length limit.

Source: Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.4, eq. 13.
"""

from typing import final

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor

from algos_gspo_dapo_grpo.validators import positive_validator


@final
@attrs.frozen(kw_only=True)
class SoftOverlong:
    """Where the punishment begins and how large it gets. Off is ``None``, which needs nothing."""

    max_length: int = attrs.field(validator=attrs.validators.ge(1))
    """Longest completion, in tokens: the sampler's limit. DAPO: 20480 (section 4.1)."""

    buffer: int = attrs.field(validator=attrs.validators.ge(1))
    """Tokens before `max_length` over which the punishment grows. DAPO: 4096 (section 4.1)."""

    factor: float = attrs.field(default=1.0, validator=positive_validator)
    """Punishment at `max_length`, in reward units. Default: that of eq. 13."""

    @buffer.validator
    def _buffer_fits(self, _: object, value: int) -> None:
        if value > self.max_length:
            raise ValueError(
                f"SoftOverlong: expected buffer <= max_length, got buffer {value} with max_length "
                f"{self.max_length}: every completion would be punished, the empty one too"
            )


def soft_overlong_penalty(
    lengths: Int[Tensor, " samples"], *, config: SoftOverlong
) -> Float[Tensor, " samples"]:
    """What to add to each reward: 0, or a punishment (DAPO, eq. 13).

    Args:
        lengths: sampled tokens of each completion.
        config: the limits.

    Returns:
        float32, in reward units: 0 up to ``max_length - buffer``, then falling in proportion to
        ``-factor`` at `max_length`, and ``-factor`` beyond it.
    """
    excess = lengths.to(torch.float32) - float(config.max_length - config.buffer)
    return -config.factor * torch.clamp(excess / config.buffer, 0.0, 1.0)
