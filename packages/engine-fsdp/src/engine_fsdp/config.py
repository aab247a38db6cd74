"""What can be configured; every setting takes effect, in every combination that is accepted."""

from typing import Any

import attrs

from parallel_state import ParallelState
from rl_contracts import DType, OptimConfig, finite, known_dtype


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

    compute_dtype: DType = attrs.field(default="bfloat16", validator=known_dtype)
    """Type of weights and activations in forward and backward. The master weights, the gradient
    that is added up and the softmax are float32 in any case."""

    export_dtype: DType | None = attrs.field(default=None, validator=known_dtype)
    """Type of exported weights: the sampler's. Default: `compute_dtype`."""

    temperature: float = attrs.field(default=1.0, validator=[finite, attrs.validators.gt(0.0)])
    """Divides the logits, as the sampler's temperature did. There is no greedy training, so 0 is
    refused. Default: the policy itself, untempered."""

    activation_checkpointing: bool = False
    """Keep only the input of each block for the backward pass and compute the rest again: less
    memory for about a third more time."""

    parallel: ParallelState = attrs.field(factory=ParallelState, validator=_data_parallel_only)
    """Ranks: `dp_size` in all, of which each `dp_replicate_size` th part holds a whole copy."""

    @property
    def resolved_export_dtype(self) -> DType:
        """The type that exported weights have."""
        return self.compute_dtype if self.export_dtype is None else self.export_dtype
