"""What can be configured; every setting takes effect, in every combination that is accepted."""

from typing import Any, Literal, get_args

import attrs

from parallel_state import ParallelState

DType = Literal["float32", "bfloat16"]
"""Names of the floating-point types that weights are computed with and exported in."""


def _known_dtype(_: object, attribute: "attrs.Attribute[Any]", value: str | None) -> None:
    if value is not None and value not in get_args(DType):
        known = " or ".join(get_args(DType))
        message = f"{attribute.name}: expected {known}, got {value!r}"
        raise ValueError(message)


def _fraction(_: object, attribute: "attrs.Attribute[Any]", value: tuple[float, float]) -> None:
    if not all(0.0 <= beta < 1.0 for beta in value):
        message = f"{attribute.name}: expected two numbers of at least 0 and below 1, got {value}"
        raise ValueError(message)


def _positive_or_none(_: object, attribute: "attrs.Attribute[Any]", value: float | None) -> None:
    if value is not None and not value > 0.0:
        message = f"{attribute.name}: expected a number above 0, or None for no limit, got {value}"
        raise ValueError(message)


@attrs.frozen(kw_only=True)
class OptimConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), clipping, and the learning rate."""

    learning_rate: float = attrs.field(validator=attrs.validators.gt(0.0))
    """Learning rate after the warmup."""

    betas: tuple[float, float] = attrs.field(default=(0.9, 0.999), validator=_fraction)
    """Decay of the running mean of the gradient and of its square. Default: torch 2.13."""

    eps: float = attrs.field(default=1e-8, validator=attrs.validators.gt(0.0))
    """Added to the root of the running square. Default: torch 2.13."""

    weight_decay: float = attrs.field(default=0.01, validator=attrs.validators.ge(0.0))
    """Share of each weight, times the learning rate, taken off per step; of all weights, norms
    included. Default: torch 2.13 and verl."""

    max_grad_norm: float | None = attrs.field(default=1.0, validator=_positive_or_none)
    """The whole gradient is scaled down to this L2 norm; None leaves it. Default: verl."""

    warmup_steps: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Optimizer steps in which the learning rate rises linearly, the first of them taken at
    ``learning_rate / warmup_steps``; constant afterwards. Default: constant from the start."""

    def learning_rate_at(self, steps_done: int) -> float:
        """Learning rate of the step that follows `steps_done` steps."""
        if steps_done >= self.warmup_steps:
            return self.learning_rate
        return self.learning_rate * (steps_done + 1) / self.warmup_steps


def _data_parallel_only(
    _: object, attribute: "attrs.Attribute[Any]", value: ParallelState[Any]
) -> None:
    others = {
        "ulysses_size": value.ulysses_size,
        "tensor_size": value.tensor_size,
        "pipeline_size": value.pipeline_size,
        **{
            f"extra_parallel_sizes[{axis!r}]": size
            for axis, size in value.extra_parallel_sizes.items()
        },
    }
    for name, size in others.items():
        if size != 1:
            message = (
                f"{attribute.name}.{name} = {size}: engine-fsdp splits work over data-parallel "
                f"ranks only (dp_size, dp_replicate_size); set {name} to 1"
            )
            raise ValueError(message)


@attrs.frozen(kw_only=True)
class FsdpConfig:
    """One policy, how it computes and how it is optimized.

    There is no seed: the weights come from the folder, dropout is off so that log-probabilities
    depend on weights and tokens alone, and nothing else here is drawn at random.
    """

    model_path: str
    """Hugging Face folder with config.json and safetensors weights."""

    optim: OptimConfig
    """The optimizer."""

    compute_dtype: DType = attrs.field(default="bfloat16", validator=_known_dtype)
    """Type of weights and activations in forward and backward. The master weights, the gradient
    that is added up and the softmax are float32 in any case."""

    export_dtype: DType | None = attrs.field(default=None, validator=_known_dtype)
    """Type of exported weights: the sampler's. Default: `compute_dtype`."""

    temperature: float = attrs.field(default=1.0, validator=attrs.validators.gt(0.0))
    """Divides the logits, as the sampler's temperature did. There is no greedy training, so 0 is
    refused. Default: the policy itself, untempered."""

    activation_checkpointing: bool = False
    """Keep only the input of each block for the backward pass and compute the rest again: less
    memory for about a third more time."""

    parallel: ParallelState = attrs.field(factory=ParallelState, validator=_data_parallel_only)
    """Ranks: `dp_size` in all, of which each `dp_replicate_size` th part holds a whole copy."""
