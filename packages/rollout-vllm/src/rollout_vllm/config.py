"""Typed configuration of the sampler."""

import copy
from collections.abc import Mapping
from typing import Literal, get_args

import attrs

from rollout_vllm.arguments import FIXED_ARGUMENTS, EffectiveArgument, check_free_arguments
from rollout_vllm.device_rules import Device, check_device_rules
from rollout_vllm.lora import Lora
from rollout_vllm.overrides import check_overrides
from rollout_vllm.server_config import ServerConfig
from rollout_vllm.speculation import Speculation
from rollout_vllm.versions import argument_names, installed_version, server_names

Dtype = Literal["bfloat16", "float16", "float32"]
LoadFormat = Literal["safetensors", "dummy"]
AttentionBackend = Literal[
    "FLASH_ATTN",
    "TRITON_ATTN",
    "FLEX_ATTENTION",
    "FLASHINFER",
    # of models with latent attention
    "FLASH_ATTN_MLA",
    "FLASHMLA",
    "FLASHINFER_MLA",
    "CUTLASS_MLA",
    "TRITON_MLA",
]
Quantization = Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"]

GIB = 2**30
_LEAST_SHARE = 0.01
# settings of which each has been tried, but not both at once
_APART = (
    ("speculation", "pipeline_parallel_size"),
    ("speculation", "return_routed_experts"),
    ("speculation", "images_per_prompt"),
    ("lora", "speculation"),
    ("lora", "quantization"),
    ("lora", "pipeline_parallel_size"),
    ("lora", "tensor_parallel_size"),
    ("lora", "data_parallel_size"),
    ("lora", "enable_sleep"),
    ("lora", "return_routed_experts"),
    ("lora", "images_per_prompt"),
    ("pipeline_parallel_size", "return_routed_experts"),
    ("pipeline_parallel_size", "images_per_prompt"),
)

_at_least_one = attrs.validators.ge(1)
_boolean = attrs.validators.instance_of(bool)
_three_valued = attrs.validators.optional(_boolean)


def _copied(given: Mapping[str, object]) -> Mapping[str, object]:
    """Later changes to the caller's own mapping do not reach the config."""
    return copy.deepcopy(dict(given))


@attrs.frozen(kw_only=True)
class VllmConfig:
    """How vLLM samples."""

    model: str
    """Local Hugging Face folder: config.json and weights as safetensors."""

    max_model_len: int = attrs.field(validator=attrs.validators.ge(2))
    """Longest prompt and completion together, in tokens."""

    device: Device = attrs.field(default="cpu", validator=attrs.validators.in_(("cpu", "cuda")))
    """What the engine runs on; the installed vLLM must be one for it. Default: what every machine
    has."""

    dtype: Dtype = attrs.field(
        default="bfloat16", validator=attrs.validators.in_(("bfloat16", "float16", "float32"))
    )
    """Type of weights and activations. Default: that of most checkpoints."""

    max_num_seqs: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_at_least_one)
    )
    """Requests decoded at once; more wait. None: 64 on the CPU, where the throughput of 2 cores
    stops growing (135M parameters, bfloat16); on a GPU vLLM decides by its memory."""

    max_num_batched_tokens: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_at_least_one)
    )
    """Tokens of all requests in one step of the engine; None: vLLM decides by the device."""

    kv_cache_gib: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.gt(0.0))
    )
    """Size of the key-value cache in GiB; None: what `gpu_memory_utilization` leaves."""

    gpu_memory_utilization: float | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(
            attrs.validators.and_(attrs.validators.gt(0.0), attrs.validators.le(1.0))
        ),
    )
    """Share of memory for weights and cache together, on the CPU too, in spite of vLLM's name.
    None: `kv_cache_gib` fixes the cache. One of the two must be given."""

    enable_prefix_caching: bool | None = attrs.field(default=None, validator=_three_valued)
    """Reuse the cache of common prefixes; None: vLLM decides by model and device."""

    enable_chunked_prefill: bool | None = attrs.field(default=None, validator=_three_valued)
    """Split long prompts over steps; None: vLLM decides by model and device."""

    enforce_eager: bool | None = attrs.field(default=None, validator=_three_valued)
    """Run without compiled graphs; None: without on the CPU, with them on a GPU. Not False on the
    CPU in this release: weight updates of compiled models have not been shown to be right there."""

    tensor_parallel_size: int = attrs.field(default=1, validator=_at_least_one)
    """Devices that share each layer. 1 on the CPU."""

    pipeline_parallel_size: int = attrs.field(default=1, validator=_at_least_one)
    """Stages that the layers are cut into, each on `tensor_parallel_size` devices. Above 1 on the
    CPU only in this release, with vLLM 0.32."""

    data_parallel_size: int = attrs.field(default=1, validator=_at_least_one)
    """Copies of the engine that share the requests, each on `tensor_parallel_size` x
    `pipeline_parallel_size` devices. 1 on the CPU."""

    expert_parallel_size: int = attrs.field(default=1, validator=_at_least_one)
    """Devices that share the experts of a mixture-of-experts model; above 1 it implies vLLM's
    `enable_expert_parallel`, must equal `tensor_parallel_size` x `data_parallel_size` (each stage
    of a pipeline has the experts of its own layers), and must divide the experts. 1 on the CPU."""

    attention_backend: AttentionBackend | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(attrs.validators.in_(get_args(AttentionBackend))),
    )
    """Attention kernels, in vLLM's names; None: vLLM decides by model and device. That the kernels
    of all layers are these is read back. None on the CPU, which has one kind."""

    quantization: Quantization | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(attrs.validators.in_(get_args(Quantization))),
    )
    """What the weights of linear layers and experts are quantised to when they are loaded, and
    again at every update, which comes in `dtype` as ever: with one scale for each tensor, output
    channel, or block of 128 x 128. Activations are quantised at each step. `rollout_logprobs` are
    those of the quantised model, so give the loss a correction for them. None, the default:
    nothing. On the CPU only in this release, with vLLM 0.32 and without experts."""

    speculation: Speculation | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(attrs.validators.instance_of(Speculation)),
    )
    """Guess next tokens and let the model check several at once, which changes no distribution;
    None, the default: one token a step. On the CPU only in this release, with vLLM 0.32."""

    lora: Lora | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.instance_of(Lora))
    )
    """Take adapters as updates, and keep the weights of the model's folder for good; None, the
    default: updates are whole weights, into which a trainer merges its adapters. For dense models;
    on the CPU with vLLM 0.32."""

    hf_overrides: Mapping[str, object] = attrs.field(factory=dict, converter=_copied)
    """Entries of the model's config.json that the sampler replaces, `rope_parameters` and
    `max_position_embeddings`, in `text_config` for models that have one. Each replaces all of the
    model's own. Give the trainer the same, or write them into config.json for both: else the
    sampler draws from another model than the one that is trained. Default: none."""

    enable_sleep: bool = attrs.field(default=False, validator=_boolean)
    """Make the engine's memory releasable while another process trains on the same device.
    Default: no, as it makes vLLM allocate through its own pool. Not on the CPU."""

    return_routed_experts: bool = attrs.field(default=False, validator=_boolean)
    """Make completions `RoutedCompletion`s, with the experts that every token went to.
    Default: no, as it costs memory and time. On the CPU with vLLM 0.30 only."""

    images_per_prompt: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Most images in one prompt, for a model that sees; vLLM sizes its caches by it. With images
    the engine loads the model's tokenizer and image processor, since vLLM cuts images itself; it
    is given no video. Default: text alone."""

    load_format: LoadFormat = attrs.field(
        default="safetensors", validator=attrs.validators.in_(("safetensors", "dummy"))
    )
    """Where the first weights come from: the files in the model's folder, or nowhere ("dummy":
    random values, for benchmarks). Pickled weights are not read: they can run code."""

    seed: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Seed of the engine's random stream."""

    cpu_threads: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_at_least_one)
    )
    """OpenMP threads of the engine's process; None: OMP_NUM_THREADS, or all cores."""

    weight_update_timeout_s: float = attrs.field(default=600.0, validator=attrs.validators.gt(0.0))
    """Longest time, in seconds, that a weight update may take before it counts as failed.
    Default: far above the half second that 135M parameters need."""

    trust_remote_code: bool = attrs.field(default=False, validator=_boolean)
    """Run Python code that comes with the model. Default: no."""

    server: ServerConfig | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(attrs.validators.instance_of(ServerConfig)),
    )
    """HTTP server for agents and tools in front of the same engine; None, the default: none.

    With one the engine loads the model's tokenizer. What `VllmSampler.sample` does stays the
    same."""

    engine_args: Mapping[str, object] = attrs.field(factory=dict, converter=_copied)
    """Further arguments of vLLM's AsyncEngineArgs, passed on as they are."""

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot take effect."""
        if (self.kv_cache_gib is None) == (self.gpu_memory_utilization is None):
            message = (
                "VllmConfig: expected exactly one of kv_cache_gib and gpu_memory_utilization "
                f"(a fixed cache leaves the share without effect), got {self.kv_cache_gib} and "
                f"{self.gpu_memory_utilization}"
            )
            raise ValueError(message)
        together = self.tensor_parallel_size * self.data_parallel_size
        if self.expert_parallel_size not in (1, together):
            message = (
                "VllmConfig: expert_parallel_size must be 1 or equal tensor_parallel_size x "
                f"data_parallel_size = {together} (vLLM spreads the experts over all of them), got "
                f"{self.expert_parallel_size}"
            )
            raise ValueError(message)
        if self.quantization is not None and self.dtype == "float32":
            message = (
                f"VllmConfig: quantization = {self.quantization!r} needs dtype bfloat16 or "
                "float16, which vLLM quantises; got float32"
            )
            raise ValueError(message)
        if self.lora is not None and self.load_format == "dummy":
            message = (
                f"VllmConfig: lora = {self.lora!r} and load_format = 'dummy': no adapter replaces "
                "the random weights beside it; set load_format to 'safetensors'"
            )
            raise ValueError(message)
        if self.lora is not None and self.device == "cuda" and self.dtype == "float32":
            message = (
                "VllmConfig: lora needs dtype bfloat16 or float16 on a GPU, as vLLM's kernels for "
                "adapters there take no other (lora_shrink_op.py, 0.25 to 0.32); got float32"
            )
            raise ValueError(message)
        check_overrides(self.hf_overrides)
        self._check_together()
        check_device_rules(
            self.device,
            {
                "tensor_parallel_size": self.tensor_parallel_size,
                "pipeline_parallel_size": self.pipeline_parallel_size,
                "data_parallel_size": self.data_parallel_size,
                "expert_parallel_size": self.expert_parallel_size,
                "enforce_eager": self.enforce_eager,
                "attention_backend": self.attention_backend,
                "quantization": self.quantization,
                "speculation": self.speculation,
                "lora": self.lora,
                "enable_sleep": self.enable_sleep,
                "return_routed_experts": self.return_routed_experts,
            },
            version=installed_version(),
        )
        check_free_arguments(self.engine_args, device=self.device)

    def _check_together(self) -> None:
        defaults = {field.name: field.default for field in attrs.fields(VllmConfig)}
        for names in _APART:
            values = {name: getattr(self, name) for name in names}
            if all(value != defaults[name] for name, value in values.items()):
                both = " and ".join(f"{name} = {value!r}" for name, value in values.items())
                raise ValueError(
                    f"VllmConfig: {both} have not been shown to be right together (tokens, "
                    "logprobs, weight updates); leave one out"
                )

    @property
    def num_devices(self) -> int:
        """Devices that the engine runs on."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def effective_engine_args(self) -> dict[str, EffectiveArgument]:
        """Every argument that vLLM will be given, with its origin; starts nothing.

        Arguments that are not listed keep vLLM's own defaults.

        Raises:
            ValueError: if the installed vLLM is not a supported one.
        """
        version = installed_version()
        if version is None:
            message = (
                "VllmConfig: no vLLM is installed; install rollout-vllm with one of its extras "
                "(cpu, cuda, ascend)"
            )
            raise ValueError(message)
        names = argument_names(version)
        if self.server is not None:
            server_names(version)
        given = {
            **_as_given(self),
            **_derived(self),
            **{
                name: EffectiveArgument(value=value, origin="VllmConfig.engine_args")
                for name, value in self.engine_args.items()
            },
        }
        return {names.get(name, name): argument for name, argument in given.items()}


def _as_given(config: VllmConfig) -> dict[str, EffectiveArgument]:
    """The fields under their own names. None means that vLLM decides; False is a decision."""
    values: dict[str, object] = {
        "model": config.model,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "kv_cache_gib": None if config.kv_cache_gib is None else int(config.kv_cache_gib * GIB),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enforce_eager": config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "expert_parallel_size": config.expert_parallel_size > 1,
        "attention_backend": config.attention_backend,
        "quantization": config.quantization,
        "speculation": None if config.speculation is None else config.speculation.as_argument(),
        "lora": config.lora is not None or None,
        "hf_overrides": copy.deepcopy(dict(config.hf_overrides)) or None,
        # left out when off, as vLLM names the latter elsewhere from 0.31 on
        "enable_sleep": config.enable_sleep or None,
        "return_routed_experts": config.return_routed_experts or None,
        "load_format": config.load_format,
        "seed": config.seed,
        "trust_remote_code": config.trust_remote_code,
    }
    return {
        field: EffectiveArgument(value=value, origin=f"VllmConfig.{field}")
        for field, value in values.items()
        if value is not None
    }


def _derived(config: VllmConfig) -> dict[str, EffectiveArgument]:
    """What the fields that were left open come to, and what this package decides."""
    derived = dict(FIXED_ARGUMENTS)
    by_device = f"derived from VllmConfig.device = {config.device!r}"
    if config.max_num_seqs is None and config.device == "cpu":
        derived["max_num_seqs"] = EffectiveArgument(value=64, origin=by_device)
    if config.enforce_eager is None:
        derived["enforce_eager"] = EffectiveArgument(value=config.device == "cpu", origin=by_device)
    if config.kv_cache_gib is not None and config.device != "cpu":
        # vLLM refuses to start if this share is not free, and then sizes the cache by the other
        # setting: with its default of 0.9 no trainer could be on the same GPU
        # (request_memory in vllm/v1/worker/utils.py, 0.23 to 0.32)
        derived["gpu_memory_utilization"] = EffectiveArgument(
            value=_LEAST_SHARE, origin="derived from VllmConfig.kv_cache_gib, which fixes the cache"
        )
    derived["skip_tokenizer_init"] = _skips_tokenizer(config)
    if config.lora is not None:
        derived |= config.lora.further_arguments()
    if config.images_per_prompt:
        derived["limit_mm_per_prompt"] = EffectiveArgument(
            value={"image": config.images_per_prompt, "video": 0},
            origin="VllmConfig.images_per_prompt",
        )
    derived["distributed_executor_backend"] = (
        EffectiveArgument(value="uni", origin="fixed: one worker lives in the engine's process")
        if config.tensor_parallel_size == config.pipeline_parallel_size == 1
        else EffectiveArgument(
            value="mp",
            origin="derived from VllmConfig.tensor_parallel_size and pipeline_parallel_size: each "
            "worker has a process",
        )
    )
    return derived


def _skips_tokenizer(config: VllmConfig) -> EffectiveArgument:
    """Whether vLLM does without the model's tokenizer."""
    if config.server is not None:
        origin = "derived from VllmConfig.server, whose clients send text"
        return EffectiveArgument(value=False, origin=origin)
    if config.images_per_prompt:
        origin = "derived from VllmConfig.images_per_prompt: vLLM's image processors want one"
        return EffectiveArgument(value=False, origin=origin)
    return EffectiveArgument(value=True, origin="fixed: token ids in, token ids out")
