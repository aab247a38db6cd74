"""The optimizer's settings, the same ones for every engine."""

import math
from typing import Any

import attrs

from rl_contracts.finite import finite


def _fractions(_: object, attribute: "attrs.Attribute[Any]", value: tuple[float, float]) -> None:
    if not all(0.0 <= beta < 1.0 for beta in value):
        message = f"{attribute.name}: expected two numbers of at least 0 and below 1, got {value}"
        raise ValueError(message)


def _positive_or_none(_: object, attribute: "attrs.Attribute[Any]", value: float | None) -> None:
    if value is not None and not 0.0 < value < math.inf:
        message = (
            f"{attribute.name}: expected a finite number above 0, or None for no limit, got {value}"
        )
        raise ValueError(message)


@attrs.frozen(kw_only=True)
class OptimConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), clipping, and the learning rate."""

    learning_rate: float = attrs.field(validator=[finite, attrs.validators.gt(0.0)])
    """Learning rate after the warmup."""

    betas: tuple[float, float] = attrs.field(default=(0.9, 0.999), validator=_fractions)
    """Decay of the running mean of the gradient and of its square. Default: torch 2.13."""

    eps: float = attrs.field(default=1e-8, validator=[finite, attrs.validators.gt(0.0)])
    """Added to the root of the running square. Default: torch 2.13."""

    weight_decay: float = attrs.field(default=0.01, validator=[finite, attrs.validators.ge(0.0)])
    """Share of each weight, times the learning rate, taken off per step; of all weights, norms
    included. Default: torch 2.13 and verl."""

    max_grad_norm: float | None = attrs.field(default=1.0, validator=_positive_or_none)
    """The whole gradient is scaled down to this L2 norm; None measures it and leaves it.
    Default: verl."""

    warmup_steps: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Optimizer steps in which the learning rate rises linearly, the first of them taken at
    ``learning_rate / warmup_steps``; constant afterwards. Default: constant from the start."""

    def learning_rate_at(self, steps_done: int) -> float:
        """Learning rate of the step that follows `steps_done` steps."""
        if steps_done >= self.warmup_steps:
            return self.learning_rate
        return self.learning_rate * (steps_done + 1) / self.warmup_steps
