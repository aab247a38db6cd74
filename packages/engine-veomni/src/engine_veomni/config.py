"""What `VeomniEngine` is configured with; field names as in `engine_fsdp.FsdpConfig`."""

from typing import ClassVar, Literal, get_args

import attrs

from parallel_state import ParallelState
from rl_contracts import DType, OptimConfig, finite, known_dtype

ExpertKernel = Literal["grouped_mm", "veomni"]
"""How the experts of a rank are computed; see `VeomniConfig.expert_kernel`."""

RouterReplay = Literal["none", "logprobs", "rollout"]
"""Whose experts a token is trained with; see `VeomniConfig.router_replay`."""

Offload = Literal["none", "parameters"]
"""What waits in the host's memory; see `VeomniConfig.offload`."""


@attrs.frozen(kw_only=True)
class VeomniConfig:
    """One policy: which model, in which precision, over which ranks, and how it is optimized.

    There is no seed: the weights come from the folder, a model with dropout is refused, and
    nothing else here is drawn at random.
    """

    kind: ClassVar[str] = "veomni"
    """Tells it from other engines' in a configuration that leaves the choice."""

    model_path: str
    """Hugging Face folder: config.json and safetensors, as published: one tensor per expert and
    projection, or for Qwen3-VL-MoE the stacks of a layer's experts."""

    optim: OptimConfig
    """The optimizer."""

    compute_dtype: DType = attrs.field(default="bfloat16", validator=known_dtype)
    """Type of weights and activations in forward and backward. The master weights, the gradient
    that is added up and the softmax are float32 in any case."""

    export_dtype: DType | None = attrs.field(default=None, validator=known_dtype)
    """Type of exported weights: the sampler's. None: `compute_dtype`."""

    temperature: float = attrs.field(default=1.0, validator=[finite, attrs.validators.gt(0.0)])
    """Divides the logits, as the sampler's temperature did. There is no greedy training, so 0 is
    refused. Default: the policy itself, untempered."""

    activation_checkpointing: bool = False
    """Keep only the input of each block for the backward pass and compute the rest again: less
    memory for about a third more time."""

    expert_kernel: ExpertKernel = attrs.field(
        default="grouped_mm", validator=attrs.validators.in_(get_args(ExpertKernel))
    )
    """``grouped_mm``: torch's grouped products, and tokens sorted by expert once. ``veomni``:
    VeOmni's own dispatch and products, which are Triton kernels on CUDA and take bfloat16 only.
    Default: the faster on two H200 (benchmarks/results/veomni_step.json)."""

    offload: Offload = attrs.field(
        default="none", validator=attrs.validators.in_(get_args(Offload))
    )
    """"parameters" keeps master weights, gradient and optimizer in the host's memory, from where a
    block's weights come when it computes, and where the optimizer steps: for models that do not fit
    otherwise. GPUs only. VeOmni has no offload of the optimizer alone. Default: all on the
    device."""

    router_replay: RouterReplay = attrs.field(
        default="none", validator=attrs.validators.in_(get_args(RouterReplay))
    )
    """``logprobs``: `forward_backward` sends each token to the experts that it went to in the last
    call of `logprobs` (R2 of arXiv:2510.11370), so that the ratio of the two policies is not one
    between different experts once a step was taken. ``rollout``: both send it to the experts that
    the sampler says it went to (R3), `PackedBatch.routed_experts`, so that neither ratio is.
    ``none``: the router's choice of the moment."""

    router_aux_loss_coef: float = attrs.field(
        default=0.0, validator=[finite, attrs.validators.ge(0.0)]
    )
    """Times the load-balancing loss of `engine_veomni.balancing`, added to the loss of each
    `forward_backward`; reported as ``loss/router_aux/mean``, without coefficient. What the model's
    config.json says under this name is not read. With ``router_replay = "none"`` it takes one more
    pass without gradient, to know the experts of all micro-batches. Default: off."""

    freeze_vision: bool = False
    """Leave the vision tower of a model that sees as it is, the part that hands its tokens to the
    language model included. Default: all of the model is trained, as in verl's script."""

    router_statistics: bool = False
    """Count in `forward_backward` how the tokens are routed; see `RouterStatistics`. Costs a few
    small kernels in each layer."""

    export_max_bytes: int = attrs.field(default=256 * 2**20, validator=attrs.validators.ge(2**20))
    """Memory for weights on their way between ranks during an export, in bytes, beside one whole
    weight: at most a stack of one layer's experts. At least 1 MiB. Default: a third of
    the largest stack of 30B-A3B in bfloat16 (768 MiB)."""

    parallel: ParallelState = attrs.field(factory=ParallelState)
    """Ranks: `dp_size` times `ulysses_size` in all, `dp_replicate_size` copies of the model,
    `ulysses_size` neighbours that share every sequence, and the experts of a layer spread over
    `extra_parallel_sizes["ep"]` of them. Other degrees are refused."""

    def __attrs_post_init__(self) -> None:
        """Refuse degrees that this engine does not run."""
        for name, size in (
            ("tensor_size", self.parallel.tensor_size),
            ("pipeline_size", self.parallel.pipeline_size),
        ):
            if size != 1:
                message = (
                    f"parallel.{name} = {size}: engine-veomni splits work over data-parallel and "
                    "expert-parallel ranks (dp_size, extra_parallel_sizes['ep']) and shares "
                    f"sequences (ulysses_size); set {name} to 1"
                )
                raise ValueError(message)
        for name, is_set in (
            ("router_replay", self.router_replay != "none"),
            ("router_statistics", self.router_statistics),
            ("router_aux_loss_coef", self.router_aux_loss_coef > 0.0),
        ):
            if is_set and self.parallel.ulysses_size > 1:
                message = (
                    f"{name} with parallel.ulysses_size = {self.parallel.ulysses_size}: which "
                    "expert a token goes to is kept per micro-batch, and each rank has a slice of "
                    f"it; set ulysses_size to 1, or leave {name} out"
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
