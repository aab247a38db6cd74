"""What can be configured; every setting takes effect, in every combination that is accepted."""

from typing import Any, ClassVar, Literal, get_args

import attrs

from parallel_state import ParallelState
from rl_contracts import DType, OptimConfig, finite, known_dtype

ActivationCheckpointing = Literal["none", "full", "selective"]
"""What a block keeps for its backward pass."""

Offload = Literal["none", "parameters"]
"""What lies in the host's memory between its uses."""

OnNonFinite = Literal["abort", "skip"]
"""What becomes of a step whose loss or gradient is not finite."""


def _sharded_or_shared(
    _: object, attribute: "attrs.Attribute[Any]", value: ParallelState[Any]
) -> None:
    others = {
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
                "ranks (dp_size, dp_replicate_size) and shares sequences (ulysses_size); set "
                f"{name} to 1"
            )
            raise ValueError(message)


def _compilable(instance: "FsdpConfig", attribute: "attrs.Attribute[bool]", value: bool) -> None:  # noqa: FBT001
    others = {
        "compute_dtype": instance.compute_dtype != "bfloat16",
        "parallel.ulysses_size": instance.parallel.ulysses_size != 1,
    }
    reasons = {
        "compute_dtype": "attention in float32 is not one kernel; set compute_dtype = 'bfloat16'",
        "parallel.ulysses_size": "its all-to-all breaks a block's graph; set ulysses_size to 1",
    }
    for name, is_in_the_way in others.items():
        if value and is_in_the_way:
            message = (
                f"{attribute.name} = True and {name}: {reasons[name]}, or {attribute.name} off"
            )
            raise ValueError(message)


def _determinable(
    instance: "FsdpConfig",
    attribute: "attrs.Attribute[bool]",
    value: bool,  # noqa: FBT001
) -> None:
    if value and instance.compile_blocks:
        message = (
            f"{attribute.name} = True and compile_blocks: torch.compile chooses kernels by how "
            "fast they ran, which differs from run to run; switch one of them off"
        )
        raise ValueError(message)


def _leaves_inputs_alone(
    instance: "FsdpConfig",
    attribute: "attrs.Attribute[bool]",
    value: bool,  # noqa: FBT001
) -> None:
    if value and instance.activation_checkpointing != "full":
        message = (
            f"{attribute.name} = True and activation_checkpointing = "
            f"{instance.activation_checkpointing!r}: the inputs of blocks are what goes to the "
            "host, and they are all that blocks keep only with activation_checkpointing = 'full'; "
            f"set it, or {attribute.name} off"
        )
        raise ValueError(message)


@attrs.frozen(kw_only=True)
class MuonConfig:
    """Muon (Jordan 2024, kellerjordan.github.io/posts/muon) for the matrices inside of the blocks.

    Embedding, head, norms, biases and stacked experts stay with AdamW as in `OptimConfig`, whose
    learning rate, schedule and weight decay hold for both: updates of a matrix are scaled to the
    size of AdamW's (Liu et al. 2025, arXiv:2502.16982, section 2.2).
    """

    momentum: float = attrs.field(
        default=0.95, validator=[finite, attrs.validators.ge(0.0), attrs.validators.lt(1.0)]
    )
    """Decay of the running sum of gradients, with Nesterov's look ahead. Default: torch 2.13."""


@attrs.frozen(kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685); all other weights stay as they are."""

    rank: int = attrs.field(default=16, validator=attrs.validators.ge(1))
    """Inner dimension of the product that is added to each weight. Default: TRL's examples."""

    alpha: float = attrs.field(default=32.0, validator=[finite, attrs.validators.gt(0.0)])
    """The product is multiplied by ``alpha / rank``. Default: twice the rank, as TRL's examples."""

    target_modules: tuple[str, ...] = attrs.field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        validator=attrs.validators.min_len(1),
    )
    """Last part of the names of the linear layers that are adapted, in every block. Default: all of
    a dense model's, as Schulman et al. 2025 (thinkingmachines.ai/blog/lora) advise."""

    seed: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Of the first values of the adapters."""


def _lora_fits(
    instance: "FsdpConfig", attribute: "attrs.Attribute[Any]", value: LoraConfig | None
) -> None:
    others = {
        "freeze": (instance.freeze, "the adapters freeze all other weights in any case"),
        "muon": (instance.muon, "its rule is for whole weights, not for the factors of a product"),
        "compile_blocks": (instance.compile_blocks, "compiled adapters have not been tried"),
    }
    for name, (setting, reason) in others.items():
        if value is not None and setting:
            message = f"{attribute.name} and {name}: {reason}; leave {name} out"
            raise ValueError(message)


def _muon_fits(
    instance: "FsdpConfig", attribute: "attrs.Attribute[Any]", value: MuonConfig | None
) -> None:
    if value is not None and instance.offload != "none":
        message = (
            f"{attribute.name} and offload = {instance.offload!r}: its products of whole matrices "
            "would run on the host; set offload to 'none', or leave muon out"
        )
        raise ValueError(message)


def _moments_fit(
    instance: "FsdpConfig",
    attribute: "attrs.Attribute[bool]",
    value: bool,  # noqa: FBT001
) -> None:
    others = {
        "muon": (instance.muon, "it keeps one moment of the same matrices, in float32"),
        "lora": (instance.lora, "the adapters' moments are few"),
        "offload = 'parameters'": (
            instance.offload != "none",
            "the moments lie in the host's memory then, where the step would be compiled too",
        ),
        "deterministic": (
            instance.deterministic,
            "torch.compile chooses the step's kernels by how fast they ran",
        ),
    }
    for name, (setting, reason) in others.items():
        if value and setting:
            message = (
                f"{attribute.name} = True and {name}: {reason}; leave {name} out, or "
                f"{attribute.name} off"
            )
            raise ValueError(message)


@attrs.frozen(kw_only=True)
class FsdpConfig:
    """One policy, how it computes and how it is optimized.

    There is no seed: the weights come from the folder, dropout is off so that log-probabilities
    depend on weights and tokens alone, and nothing else here is drawn at random.
    """

    kind: ClassVar[str] = "fsdp"
    """Tells it from other engines' in a configuration that leaves the choice."""

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

    parallel: ParallelState = attrs.field(factory=ParallelState, validator=_sharded_or_shared)
    """Ranks: `dp_size` times `ulysses_size` in all. Each `dp_replicate_size` th part of them holds
    a whole copy of the weights; `ulysses_size` neighbours share every sequence."""

    # How it computes.

    activation_checkpointing: ActivationCheckpointing = attrs.field(
        default="none", validator=attrs.validators.in_(get_args(ActivationCheckpointing))
    )
    """"full" keeps only the input of each block for the backward pass and computes the rest again:
    least memory, for about a third more time. "selective" keeps attention and every second matrix
    product besides. Default: keep all, which is fastest."""

    offload_activations: bool = attrs.field(default=False, validator=_leaves_inputs_alone)
    """Keep the inputs of checkpointed blocks in the host's memory until the backward pass. They
    leave and come back beside the computation, and the device holds two of them at a time: for
    micro-batches that do not fit otherwise. Each rank pins tokens x hidden size x 2 bytes (4 in
    float32) for every block, which torch rounds up to a power of two (2.13,
    CachingHostAllocator.h). GPUs and full checkpointing only. Default: on the device."""

    compile_blocks: bool = attrs.field(default=False, validator=_compilable)
    """Run each block as one graph of torch.compile: fewer passes over memory, and a minute or so at
    the first batch. GPUs and bfloat16 only. Default: off."""

    kept_logits_gib: float = attrs.field(default=0.25, validator=[finite, attrs.validators.ge(0.0)])
    """Logits kept from forward to backward, up to this many GiB; the others are computed again,
    which makes the head a third dearer. A micro-batch of 32768 tokens to learn from has 9.3 GiB of
    them in bfloat16 with a vocabulary of 152k. Default: those of small micro-batches."""

    offload: Offload = attrs.field(
        default="none", validator=attrs.validators.in_(get_args(Offload))
    )
    """"parameters" keeps master weights, gradient and optimizer in the host's memory, from where a
    block's weights come when it computes, and where the optimizer steps: for models that do not fit
    otherwise. GPUs only. Default: all on the device."""

    # Optimizer and state.

    muon: MuonConfig | None = attrs.field(default=None, validator=_muon_fits)
    """Muon for the matrices inside of the blocks. Default: AdamW for everything."""

    eight_bit_moments: bool = attrs.field(default=False, validator=_moments_fit)
    """Keep the moments of AdamW in 8 bits (Dettmers et al. 2021, arXiv:2110.02861) where they are
    many: those of the blocks' matrices, 2.03 bytes for each weight instead of 8. 256 neighbours in
    a row share a scale; matrices whose rows do not divide into them, embedding, head and norms keep
    float32. Second moments are at least 3e-7 of the largest of their 256: an element whose
    gradients are below 1/1750 of the largest among them moves less far than it would. Needs the
    extra `eight-bit` (torchao), whose step is compiled. Default: float32."""

    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: patterns for their names, in which * stands for anything,
    such as "model.embed_tokens.*". They are in no checkpoint. Default: all are trained."""

    lora: LoraConfig | None = attrs.field(default=None, validator=_lora_fits)
    """Train adapters instead of the weights; needs the extra `lora`. Weights are exported with the
    adapters merged. Default: the weights themselves."""

    on_non_finite: OnNonFinite = attrs.field(
        default="abort", validator=attrs.validators.in_(get_args(OnNonFinite))
    )
    """What a loss or gradient does that is infinite or nan, on any rank: "abort" raises
    FloatingPointError and names the sequences; "skip" drops the gradient of the whole step, logs
    the same text as a warning, and counts the step, with a `grad_norm` that is not finite. Neither
    changes a weight. Default: "abort", since it is a fault more often than bad luck."""

    wait_timeout_s: float = attrs.field(
        default=1800.0, validator=[finite, attrs.validators.gt(0.0)]
    )
    """How long a rank waits at the beginning of a call for the others before it raises and names
    them, in seconds. Default: torch's for gloo (torch 2.13)."""

    deterministic: bool = attrs.field(default=False, validator=_determinable)
    """Two runs are the same bit for bit on the same machines. Switches torch's deterministic
    algorithms on for the whole process, where they are slower, and an operation that has none
    raises. On GPUs the environment needs CUBLAS_WORKSPACE_CONFIG=:4096:8, which torch asks for.
    Default: off."""

    @property
    def resolved_export_dtype(self) -> DType:
        """The type that exported weights have."""
        return self.compute_dtype if self.export_dtype is None else self.export_dtype
