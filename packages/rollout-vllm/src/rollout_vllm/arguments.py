"""What goes to vLLM: which arguments our fields own, and which may be given freely."""

import ast
import difflib
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import attrs

from rollout_vllm.device_rules import Device
from rollout_vllm.plain import Plain

TRANSFER_BACKEND = "rollout_vllm"
"""Name under which vLLM knows our weight-transfer engine."""

WORKER_EXTENSION = "rollout_vllm.engine_core.WorkerExtension"
"""Class whose import registers the engine in vLLM's own process."""


@attrs.frozen(kw_only=True)
class EffectiveArgument:
    """One argument as vLLM receives it."""

    value: object
    """The value."""

    origin: str
    """Who set it: a field of `VllmConfig`, its ``engine_args``, or a rule of this package."""


FIXED_ARGUMENTS: Mapping[str, EffectiveArgument] = MappingProxyType(
    {
        "logprobs_mode": EffectiveArgument(
            value="processed_logprobs",
            origin="fixed: logprobs are those of the distribution that tokens are drawn from, "
            "after temperature and top_p",
        ),
        "worker_extension_cls": EffectiveArgument(
            value=WORKER_EXTENSION, origin="fixed: brings the receiving half of weight transfer"
        ),
        "weight_transfer_config": EffectiveArgument(
            value={"backend": TRANSFER_BACKEND}, origin="fixed: weights come by our transports"
        ),
        "disable_log_stats": EffectiveArgument(
            value=True, origin="fixed: metrics are the training loop's"
        ),
    }
)
"""Arguments that this package sets, with the reason."""

_SPECULATION = ("spec_method", "spec_model", "spec_tokens")
_QUANTIZED_ALL = (
    "use VllmConfig.quantization, which quantises every linear layer and expert; no update of "
    "weights has been shown to be right with parts of them"
)

_OWNED: Mapping[str, str] = MappingProxyType(
    {
        "model": "use VllmConfig.model",
        "dtype": "use VllmConfig.dtype",
        "max_model_len": "use VllmConfig.max_model_len",
        "max_num_seqs": "use VllmConfig.max_num_seqs",
        "max_num_batched_tokens": "use VllmConfig.max_num_batched_tokens",
        "tensor_parallel_size": "use VllmConfig.tensor_parallel_size",
        "pipeline_parallel_size": "use VllmConfig.pipeline_parallel_size",
        "data_parallel_size": "use VllmConfig.data_parallel_size",
        # verl#6066: the flag was accepted, and then overwritten by the size
        "enable_expert_parallel": (
            "use VllmConfig.expert_parallel_size: a size above 1 implies enable_expert_parallel"
        ),
        "gpu_memory_utilization": "use VllmConfig.gpu_memory_utilization",
        "kv_cache_memory_bytes": "use VllmConfig.kv_cache_gib",
        "enable_prefix_caching": "use VllmConfig.enable_prefix_caching",
        "enable_chunked_prefill": "use VllmConfig.enable_chunked_prefill",
        "enforce_eager": "use VllmConfig.enforce_eager",
        "attention_backend": "use VllmConfig.attention_backend",
        "quantization": "use VllmConfig.quantization",
        "quantization_config": _QUANTIZED_ALL,
        **dict.fromkeys(("speculative_config", *_SPECULATION), "use VllmConfig.speculation"),
        **dict.fromkeys(
            ("enable_lora", "lora_target_modules", "max_lora_rank", "max_loras"),
            "use VllmConfig.lora",
        ),
        "hf_overrides": "use VllmConfig.hf_overrides",
        "enable_sleep_mode": "use VllmConfig.enable_sleep",
        "enable_return_routed_experts": "use VllmConfig.return_routed_experts",
        "limit_mm_per_prompt": "use VllmConfig.images_per_prompt",
        "load_format": "use VllmConfig.load_format (pickled weights can run code)",
        "seed": "use VllmConfig.seed",
        "trust_remote_code": "use VllmConfig.trust_remote_code",
        **{name: f"it is {fixed.origin}" for name, fixed in FIXED_ARGUMENTS.items()},
        "skip_tokenizer_init": "it follows from VllmConfig.server and images_per_prompt",
        "tokenizer": "VllmConfig.server uses the one in the folder VllmConfig.model",
        "distributed_executor_backend": (
            "it follows from VllmConfig.tensor_parallel_size and pipeline_parallel_size"
        ),
        "worker_cls": "its weights could not be updated",
    }
)

# every one of these changes which weights, keys and values the engine holds or where, and no test
# has shown that an update then reaches all of them
_NOT_UPDATABLE = frozenset(
    {
        "nnodes",
        "enable_eplb",
        "enable_elastic_ep",
        "cpu_offload_gb",
        "cpu_offload_params",
        "offload_backend",
        "offload_group_size",
        "offload_num_in_group",
        "offload_params",
        "offload_prefetch_step",
        # scales of the cache that vLLM 0.23 and 0.25 take from the first weights' first prompt
        "calculate_kv_scales",
        # how experts and linear layers lie in memory
        "moe_backend",
        "linear_backend",
        "kv_offloading_backend",
        "kv_offloading_size",
        "kv_transfer_config",
        "model_impl",
    }
)

_ONE_DEVICE = "it has no effect: the engine runs on one device in one process"
_ONE_ADAPTER = (
    "VllmConfig.lora takes one adapter for all requests, of linear layers of the blocks, in the "
    "type of the weights, and no other use has been shown to be right"
)
_EAGER = "it has no effect: VllmConfig.enforce_eager leaves no graph to compile or capture"
_UNTESTED = "it is not supported yet: no test has shown that it does its work on GPUs"
_NO_TOKENIZER = (
    "no tokenizer is loaded, but for VllmConfig.server, which takes the model's own as its files "
    "describe it"
)
_LOCAL = "it has no effect: the model is the local folder VllmConfig.model, weights as safetensors"
_AMD = "it has no effect: vLLM reads it on AMD GPUs alone"
_OTHER_MODEL = (
    "the engine would run another model than the one trained; change config.json in the folder "
    "VllmConfig.model instead"
)
_OTHER_DISTRIBUTION = (
    "tokens would be drawn from another distribution than SamplingParams says, and "
    "rollout_logprobs would be those of that one"
)
_OTHER_END = (
    "a completion would end elsewhere than the model's own generation_config.json says; use "
    "SamplingParams.stop_token_ids to end it at further tokens"
)


def _each(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


# vLLM takes every one of these, and reports most of them as they were given
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **_each(
            _ONE_DEVICE,
            "all2all_backend",
            "cp_kv_cache_interleave_size",
            "data_parallel_address",
            "data_parallel_backend",
            "data_parallel_external_lb",
            "data_parallel_hybrid_lb",
            "data_parallel_multi_port_external_lb",
            "data_parallel_rank",
            "data_parallel_rpc_port",
            "data_parallel_size_local",
            "data_parallel_start_rank",
            "dbo_decode_token_threshold",
            "dbo_prefill_token_threshold",
            "dcp_comm_backend",
            "dcp_kv_cache_interleave_size",
            "dcp_q_replicate",
            "decode_context_parallel_size",
            "disable_custom_all_reduce",
            "disable_nccl_for_dp_synchronization",
            "dp_sync_interval",
            "elastic_ep_max_dp_size",
            "enable_batch_sharded_sampling",
            "enable_dbo",
            "enable_ep_weight_filter",
            "eplb_config",
            "expert_placement_strategy",
            "master_addr",
            "master_port",
            "max_parallel_loading_workers",
            "node_rank",
            "prefill_context_parallel_size",
            "ray_workers_use_nsight",
            "ubatch_size",
        ),
        **_each(
            _ONE_ADAPTER,
            "default_mm_loras",
            "enable_mixed_moe_lora_format",
            "enable_moe_shared_loras",
            "enable_tower_connector_lora",
            "fully_sharded_loras",
            "lora_dtype",
            "max_cpu_loras",
            "max_lora_cls_labels",
            "specialize_active_lora",
        ),
        **_each(
            _EAGER,
            "compilation_config",
            "cudagraph_capture_sizes",
            "cudagraph_metrics",
            "max_cudagraph_capture_size",
            "optimization_level",
        ),
        **_each(_NO_TOKENIZER, "tokenizer_mode", "tokenizer_revision"),
        **_each(
            _LOCAL,
            "code_revision",
            "download_dir",
            "hf_token",
            "pt_load_map_location",
            "revision",
        ),
        **_each(
            _OTHER_MODEL,
            "config_format",
            "convert",
            "diffusion_config",
            "disable_sliding_window",
            "hf_config_path",
            "ignore_patterns",
            "model_class_overrides",
            "model_weights",
            "pooler_config",
            "runner",
        ),
        **_each(_AMD, "override_attention_dtype"),
        **_each(_OTHER_DISTRIBUTION, "logits_processors", "watermark_config"),
        **_each(_OTHER_END, "generation_config", "override_generation_config"),
    }
)

_VERIFIED_ON_GPU = frozenset({"max_cudagraph_capture_size"})
"""Arguments without effect on one CPU that have one on GPUs, where a test has read them back."""


@lru_cache(maxsize=1)
def known_arguments() -> frozenset[str] | None:
    """Arguments of the installed vLLM's `AsyncEngineArgs`; None if no vLLM is installed.

    Read from its source, so that checking a config does not cost an import of vLLM.
    """
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    classes = {
        node.name: node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    return frozenset(
        statement.target.id
        for name in ("EngineArgs", "AsyncEngineArgs")
        for statement in classes[name].body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not statement.target.id.startswith("_")
    )


def check_free_arguments(engine_args: Mapping[str, object], *, device: Device) -> None:
    """Refuse arguments that a field owns, that vLLM does not know, or that would not do their work.

    The latter have no effect here, change which model runs or what is drawn, are missed by weight
    updates, or hold a value that cannot be compared with the engine's.

    Raises:
        ValueError: names all of them, each with the setting that works.
    """
    known = known_arguments()
    problems = [
        problem
        for name, value in engine_args.items()
        if (problem := _problem(name, value, device=device, known=known)) is not None
    ]
    if problems:
        raise ValueError("engine_args: " + "; ".join(problems))


def _problem(
    name: str, value: object, *, device: Device, known: frozenset[str] | None
) -> str | None:
    """Why one argument cannot be given, with what works; None if it can."""
    if name in _OWNED:
        return f"{name!r} cannot be given here: {_OWNED[name]}"
    if name in _NOT_UPDATABLE:
        return (
            f"{name!r} is not supported yet: weight updates have not been shown to be right with it"
        )
    reason = _REFUSED.get(name)
    if device != "cpu" and reason in (_ONE_DEVICE, _EAGER):
        # it has an effect there
        reason = None if name in _VERIFIED_ON_GPU else _UNTESTED
    if reason is not None:
        return f"{name!r} cannot be given here: {reason}"
    if known is not None and name not in known:
        usable = sorted(known - _NOT_UPDATABLE - set(_REFUSED))
        close = difflib.get_close_matches(name, usable, n=1, cutoff=0.0)
        owner = f" ({_OWNED[close[0]]})" if close[0] in _OWNED else ""
        return f"{name!r} is not an argument of the installed vLLM; nearest: {close[0]!r}{owner}"
    if not isinstance(value, Plain):
        return (
            f"{name!r} is {value!r} ({type(value).__name__}), which cannot be read back from "
            "the engine's process to verify it; expected a bool, number or string"
        )
    return None
