"""Typed configuration of the sampler."""

from collections.abc import Mapping
from typing import Literal

import attrs

from rollout_vllm.arguments import (
    FIXED_ARGUMENTS,
    EffectiveArgument,
    check_free_arguments,
)
from rollout_vllm.versions import argument_names, installed_version

Dtype = Literal["bfloat16", "float16", "float32"]

GIB = 2**30

_at_least_one = attrs.validators.ge(1)
_boolean = attrs.validators.instance_of(bool)


def _copied(engine_args: Mapping[str, object]) -> Mapping[str, object]:
    """Later changes to the caller's own mapping do not reach the config."""
    return dict(engine_args)


@attrs.frozen(kw_only=True)
class VllmConfig:
    """How vLLM samples. Runs on the CPU in this release."""

    model: str
    """Local Hugging Face folder: config.json and weights as safetensors."""

    max_model_len: int = attrs.field(validator=attrs.validators.ge(2))
    """Longest prompt and completion together, in tokens."""

    dtype: Dtype = attrs.field(
        default="bfloat16", validator=attrs.validators.in_(("bfloat16", "float16", "float32"))
    )
    """Type of weights and activations. Default: that of most checkpoints."""

    max_num_seqs: int = attrs.field(default=64, validator=_at_least_one)
    """Requests decoded at once; more wait. Default: where the throughput of 2 CPU cores stops
    growing (135M parameters, bfloat16)."""

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

    enable_prefix_caching: bool | None = attrs.field(
        default=None, validator=attrs.validators.optional(_boolean)
    )
    """Reuse the cache of common prefixes; None: vLLM decides by model and device."""

    enable_chunked_prefill: bool | None = attrs.field(
        default=None, validator=attrs.validators.optional(_boolean)
    )
    """Split long prompts over steps; None: vLLM decides by model and device."""

    enforce_eager: bool = attrs.field(default=True, validator=_boolean)
    """Run without compiled graphs. Must be True on the CPU in this release: weight updates of
    compiled models have not been shown to be right there."""

    tensor_parallel_size: int = attrs.field(default=1, validator=_at_least_one)
    """Devices that share each layer. 1 on the CPU."""

    expert_parallel_size: int = attrs.field(default=1, validator=_at_least_one)
    """Devices that share the experts; above 1 it implies vLLM's `enable_expert_parallel` and
    must equal `tensor_parallel_size`. 1 on the CPU."""

    seed: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Seed of the engine's random stream."""

    cpu_threads: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_at_least_one)
    )
    """OpenMP threads of the engine; None: OMP_NUM_THREADS, or all cores."""

    weight_update_timeout_s: float = attrs.field(default=600.0, validator=attrs.validators.gt(0.0))
    """Longest time, in seconds, that a weight update may take before it counts as failed.
    Default: far above the half second that 135M parameters need."""

    trust_remote_code: bool = attrs.field(default=False, validator=_boolean)
    """Run Python code that comes with the model. Default: no."""

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
        if self.expert_parallel_size not in (1, self.tensor_parallel_size):
            message = (
                "VllmConfig: expert_parallel_size must be 1 or equal tensor_parallel_size = "
                f"{self.tensor_parallel_size}, got {self.expert_parallel_size}"
            )
            raise ValueError(message)
        for name in ("tensor_parallel_size", "expert_parallel_size"):
            if getattr(self, name) > 1:
                message = (
                    f"VllmConfig: {name} = {getattr(self, name)} cannot run on the CPU in this "
                    "release (vLLM 0.32 crashes in the fused experts, and needs threads bound to "
                    f"cores for tensor parallelism); use {name} = 1"
                )
                raise ValueError(message)
        if not self.enforce_eager:
            message = (
                "VllmConfig: enforce_eager = False is not supported on the CPU in this release: "
                "weight updates of compiled models have not been shown to be right there; use True"
            )
            raise ValueError(message)
        check_free_arguments(self.engine_args)

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
        values: dict[str, object] = {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_gib": None if self.kv_cache_gib is None else int(self.kv_cache_gib * GIB),
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enable_prefix_caching": self.enable_prefix_caching,
            "enable_chunked_prefill": self.enable_chunked_prefill,
            "enforce_eager": self.enforce_eager,
            "tensor_parallel_size": self.tensor_parallel_size,
            "expert_parallel_size": self.expert_parallel_size > 1,
            "seed": self.seed,
            "trust_remote_code": self.trust_remote_code,
        }
        names = argument_names(version)
        return {
            **{
                names[field]: EffectiveArgument(value=value, origin=f"VllmConfig.{field}")
                for field, value in values.items()
                # None means that vLLM decides; False is a decision and is passed on
                if value is not None
            },
            **FIXED_ARGUMENTS,
            **{
                name: EffectiveArgument(value=value, origin="VllmConfig.engine_args")
                for name, value in self.engine_args.items()
            },
        }
