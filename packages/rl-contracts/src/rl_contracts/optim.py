"""The optimizer's settings, the same ones for every engine."""

import math
from typing import Any, Literal, get_args

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


Schedule = Literal["constant", "linear", "cosine"]
"""How the learning rate goes on after the warmup: stays, falls in a line, falls along half a
cosine (Loshchilov & Hutter 2017, arXiv:1608.03983)."""


@attrs.frozen(kw_only=True)
class OptimConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), clipping, and the learning rate.

    The learning rate is a function of the number of optimizer steps alone, so that a schedule has
    no state, and a run that is resumed goes on where it was.
    """

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
    ``learning_rate / warmup_steps``, the last at `learning_rate`. Default: none."""

    schedule: Schedule = attrs.field(
        default="constant", validator=attrs.validators.in_(get_args(Schedule))
    )
    """What follows the warmup. A schedule that falls needs `total_steps`. Default: verl."""

    total_steps: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Optimizer steps, those of the warmup included, after which `final_learning_rate` is reached.
    None with a constant schedule, and only there: a rate that falls towards an unknown end is 0 or
    anything (verl#6683)."""

    final_learning_rate: float | None = attrs.field(
        default=None,
        validator=attrs.validators.optional([finite, attrs.validators.ge(0.0)]),
    )
    """Learning rate of every step after the first `total_steps`. None: 0 where the schedule falls,
    and an engine then refuses to step past its end, where no weight would change. Default:
    transformers' schedules."""

    def __attrs_post_init__(self) -> None:
        """Refuse a schedule without its end, and an end without a schedule that has one."""
        if self.schedule == "constant":
            for name in ("total_steps", "final_learning_rate"):
                if getattr(self, name) is not None:
                    message = (
                        f"{name} = {getattr(self, name)}: a constant schedule has no end; leave it "
                        "out, or set schedule to linear or cosine"
                    )
                    raise ValueError(message)
            return
        if self.total_steps is None:
            message = (
                f"schedule = {self.schedule}: expected total_steps, the optimizer steps after "
                "which the learning rate has fallen, got None; give it, or set schedule to constant"
            )
            raise ValueError(message)
        if self.total_steps <= self.warmup_steps:
            message = (
                f"total_steps = {self.total_steps}: expected more than warmup_steps = "
                f"{self.warmup_steps}, so that there are steps in which the learning rate falls"
            )
            raise ValueError(message)
        if self.final_learning_rate is not None and self.final_learning_rate > self.learning_rate:
            message = (
                f"final_learning_rate = {self.final_learning_rate}: expected at most learning_rate "
                f"= {self.learning_rate}"
            )
            raise ValueError(message)

    def learning_rate_at(self, steps_done: int) -> float:
        """Learning rate of the step that follows `steps_done` steps.

        Of the way from `final_learning_rate` up to `learning_rate`, with ``p = (steps_done -
        warmup_steps) / (total_steps - warmup_steps)``, there is left ``1 - p`` (linear) or
        ``(1 + cos(pi p)) / 2`` (cosine), as in transformers 5.19 (optimization.py). From
        `total_steps` on nothing is left; transformers' cosine rises again there.
        """
        if steps_done < self.warmup_steps:
            return self.learning_rate * (steps_done + 1) / self.warmup_steps
        if self.total_steps is None:
            return self.learning_rate
        final = self.final_learning_rate or 0.0
        if steps_done >= self.total_steps:
            return final
        progress = (steps_done - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        left = 1.0 - progress
        if self.schedule == "cosine":
            left = (1.0 + math.cos(math.pi * progress)) / 2.0
        return final + (self.learning_rate - final) * left
