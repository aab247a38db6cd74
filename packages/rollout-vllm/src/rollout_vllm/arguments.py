"""What goes to vLLM: which arguments our fields own, and which may be given freely."""

import ast
import difflib
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import attrs

TRANSFER_BACKEND = "rollout_shared_memory"
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
        "skip_tokenizer_init": EffectiveArgument(
            value=True, origin="fixed: token ids in, token ids out"
        ),
        "load_format": EffectiveArgument(
            value="safetensors", origin="fixed: pickled weights can run code"
        ),
        "distributed_executor_backend": EffectiveArgument(
            value="uni", origin="fixed: one worker lives in the engine's process"
        ),
        "worker_extension_cls": EffectiveArgument(
            value=WORKER_EXTENSION, origin="fixed: brings the receiving half of weight transfer"
        ),
        "weight_transfer_config": EffectiveArgument(
            value={"backend": TRANSFER_BACKEND}, origin="fixed: weights come by shared memory"
        ),
        "disable_log_stats": EffectiveArgument(
            value=True, origin="fixed: metrics are the training loop's"
        ),
    }
)
"""Arguments that this package sets, with the reason."""

_OWNED: Mapping[str, str] = MappingProxyType(
    {
        "model": "use VllmConfig.model",
        "dtype": "use VllmConfig.dtype",
        "max_model_len": "use VllmConfig.max_model_len",
        "max_num_seqs": "use VllmConfig.max_num_seqs",
        "tensor_parallel_size": "use VllmConfig.tensor_parallel_size",
        # verl#6066: the flag was accepted, and then overwritten by the size
        "enable_expert_parallel": (
            "use VllmConfig.expert_parallel_size: a size above 1 implies enable_expert_parallel"
        ),
        "gpu_memory_utilization": "use VllmConfig.gpu_memory_utilization",
        "kv_cache_memory_bytes": "use VllmConfig.kv_cache_gib",
        "enable_prefix_caching": "use VllmConfig.enable_prefix_caching",
        "enable_chunked_prefill": "use VllmConfig.enable_chunked_prefill",
        "enforce_eager": "use VllmConfig.enforce_eager",
        "seed": "use VllmConfig.seed",
        "trust_remote_code": "use VllmConfig.trust_remote_code",
        **{name: f"it is {fixed.origin}" for name, fixed in FIXED_ARGUMENTS.items()},
        "tokenizer": f"it is {FIXED_ARGUMENTS['skip_tokenizer_init'].origin}",
        "worker_cls": "its weights could not be updated",
    }
)

# every one of these changes which weights the engine holds or where, and no test has shown that
# an update then reaches all of them
_NOT_UPDATABLE = frozenset(
    {
        "pipeline_parallel_size",
        "data_parallel_size",
        "nnodes",
        "enable_lora",
        "quantization",
        "quantization_config",
        "speculative_config",
        "spec_method",
        "spec_model",
        "spec_tokens",
        "enable_eplb",
        "enable_elastic_ep",
        "cpu_offload_gb",
        "enable_sleep_mode",
        "kv_transfer_config",
        "model_impl",
    }
)


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


def check_free_arguments(engine_args: Mapping[str, object]) -> None:
    """Refuse arguments that a field owns, that vLLM does not know, or that updates would miss.

    Raises:
        ValueError: names all of them, each with the setting that works.
    """
    known = known_arguments()
    problems: list[str] = []
    for name in engine_args:
        if name in _OWNED:
            problems.append(f"{name!r} cannot be given here: {_OWNED[name]}")
        elif name in _NOT_UPDATABLE:
            problems.append(
                f"{name!r} is not supported yet: weight updates have not been shown to be right "
                "with it"
            )
        elif known is not None and name not in known:
            close = difflib.get_close_matches(name, sorted(known - _NOT_UPDATABLE), n=1, cutoff=0.0)
            owner = f" ({_OWNED[close[0]]})" if close[0] in _OWNED else ""
            problems.append(
                f"{name!r} is not an argument of the installed vLLM; nearest: {close[0]!r}{owner}"
            )
    if problems:
        raise ValueError("engine_args: " + "; ".join(problems))
