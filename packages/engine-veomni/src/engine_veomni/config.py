"""What `VeomniEngine` is configured with; field names as in `engine_fsdp.FsdpConfig`."""

from typing import Any, Literal

import attrs

from parallel_state import ParallelState

DType = Literal["float32", "bfloat16"]
"""Names of the floating-point types that weights are computed with and exported in."""


def _fractions(_: object, attribute: "attrs.Attribute[Any]", value: tuple[float, float]) -> None:
    if not all(0.0 <= beta < 1.0 for beta in value):
        message = f"{attribute.name}: expected two numbers of at least 0 and below 1, got {value}"
        raise ValueError(message)


@attrs.frozen(kw_only=True)
class OptimConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) on float32 master weights."""

    learning_rate: float = attrs.field(validator=attrs.validators.gt(0.0))
    """Learning rate after the warmup."""

    betas: tuple[float, float] = attrs.field(default=(0.9, 0.999), validator=_fractions)
    """Decay of the running mean of the gradient and of its square. Default: torch 2.13."""

    eps: float = attrs.field(default=1e-8, validator=attrs.validators.gt(0.0))
    """Added to the root of the running square. Default: torch 2.13."""

    weight_decay: float = attrs.field(default=0.01, validator=attrs.validators.ge(0.0))
    """Share of each weight, times the learning rate, taken off per step; of all weights, norms
    included. Default: torch 2.13."""

    max_grad_norm: float | None = attrs.field(default=1.0)
    """The whole gradient is scaled down to this L2 norm; None measures it and leaves it."""

    warmup_steps: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Optimizer steps in which the learning rate rises linearly, the first of them taken at
    ``learning_rate / warmup_steps``; constant afterwards. Default: constant from the start."""

    @max_grad_norm.validator
    def _positive_or_none(self, _: object, value: float | None) -> None:
        if value is not None and not value > 0.0:
            message = (
                f"max_grad_norm: expected a norm above 0, or None to clip nothing, got {value}"
            )
            raise ValueError(message)

    def learning_rate_at(self, steps_done: int) -> float:
        """Learning rate of the step that follows `steps_done` steps."""
        if steps_done >= self.warmup_steps:
            return self.learning_rate
        return self.learning_rate * (steps_done + 1) / self.warmup_steps


@attrs.frozen(kw_only=True)
class VeomniConfig:
    """One policy: which model, in which precision, over which ranks, and how it is optimized.

    There is no seed: the weights come from the folder, a model with dropout is refused, and
    nothing else here is drawn at random.
    """

    model_path: str
    """Hugging Face folder: config.json and safetensors with one tensor per expert."""

    optim: OptimConfig
    """The optimizer."""

    compute_dtype: DType = "bfloat16"
    """Type of weights and activations in forward and backward. The master weights, the gradient
    that is added up and the softmax are float32 in any case."""

    export_dtype: DType | None = None
    """Type of exported weights: the sampler's. None: `compute_dtype`."""

    temperature: float = attrs.field(default=1.0, validator=attrs.validators.gt(0.0))
    """Divides the logits, as the sampler's temperature did. There is no greedy training, so 0 is
    refused. Default: the policy itself, untempered."""

    activation_checkpointing: bool = False
    """Keep only the input of each block for the backward pass and compute the rest again: less
    memory for about a third more time."""

    parallel: ParallelState = attrs.field(factory=ParallelState)
    """Ranks: `dp_size` in all, `dp_replicate_size` copies of the model, and the experts of a
    layer spread over `extra_parallel_sizes["ep"]` of them. Other degrees are refused."""

    def __attrs_post_init__(self) -> None:
        """Refuse degrees that this engine does not run."""
        for name, size in (
            ("ulysses_size", self.parallel.ulysses_size),
            ("tensor_size", self.parallel.tensor_size),
            ("pipeline_size", self.parallel.pipeline_size),
        ):
            if size != 1:
                message = (
                    f"parallel.{name} = {size}: engine-veomni splits work over data-parallel and "
                    f"expert-parallel ranks only (dp_size, extra_parallel_sizes['ep']); "
                    f"set {name} to 1"
                )
                raise ValueError(message)
        if (axes := set(self.parallel.extra_parallel_sizes)) != {"ep"}:
            message = (
                f"parallel.extra_parallel_sizes: expected 'ep' alone, got {sorted(axes)}; "
                "the models of engine-veomni have no other axis to split"
            )
            raise ValueError(message)

    @property
    def resolved_export_dtype(self) -> DType:
        """The type that exported weights have."""
        return self.compute_dtype if self.export_dtype is None else self.export_dtype
