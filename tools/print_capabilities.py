"""Print docs/capabilities.md: what runs with which engine, sampler and device, and what is refused.

The table is not written down twice: each row constructs the configuration that would use the
feature, and shows the refusal, if there is one, in the package's own words.

    ./run tools/print_capabilities.py > docs/capabilities.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from algos_gspo_dapo_grpo import GrpoLoss, KlPenalty, PolicyLoss, TokenTruncation
from engine_fsdp import FsdpConfig, LoraConfig, MuonConfig, OptimConfig as FsdpOptim
from engine_veomni import OptimConfig as VeomniOptim, VeomniConfig
from parallel_state import ExtraParallelSizes, ParallelState
from rollout_vllm import Lora, ServerConfig, Speculation, VllmConfig

HEADER = """\
# Capabilities

Printed by `tools/print_capabilities.py`, which asks the packages: each row constructs the
configuration, and what is refused is refused in these words before anything starts.
What has no row does not exist yet, and has no setting either.

The rows were asked for a CPU, where the tests run them.
On NVIDIA GPUs engines and sampler have run too, each by itself, with what their READMEs name (torch
2.11, vLLM 0.25.1); what a GPU alone can do is refused here in words that say so. NPUs are refused.

| part | feature | |
| --- | --- | --- |
"""

GUESSES = Speculation(num_speculative_tokens=3)
ADAPTERS = Lora(rank=16, alpha=32.0, target_modules=("q_proj", "v_proj"))
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
COSINE = FsdpOptim(learning_rate=1e-6, schedule="cosine", total_steps=100)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A feature of a part, and the construction that would use it."""

    part: str
    feature: str
    construct: Callable[[], object]


def fsdp(**settings: object) -> Callable[[], object]:
    """An engine-fsdp configuration with these settings."""
    fixed = {"model_path": "model", "optim": FsdpOptim(learning_rate=1e-6), **settings}
    return lambda: FsdpConfig(**fixed)  # type: ignore[arg-type]  # probes are untyped on purpose


def veomni(**settings: object) -> Callable[[], object]:
    """An engine-veomni configuration with these settings."""
    fixed = {"model_path": "model", "optim": VeomniOptim(learning_rate=1e-6)}
    return lambda: VeomniConfig(**fixed, **settings)  # type: ignore[arg-type]  # probes are untyped on purpose


def optim(**settings: object) -> Callable[[], object]:
    """The optimizer's configuration, for either engine."""
    return lambda: FsdpOptim(learning_rate=1e-6, **settings)  # type: ignore[arg-type]  # untyped


def vllm(**settings: object) -> Callable[[], object]:
    """A rollout-vllm configuration with these settings."""
    fixed = {"model": "model", "max_model_len": 64, "kv_cache_gib": 1.0}
    return lambda: VllmConfig(**fixed, **settings)  # type: ignore[arg-type]  # probes are untyped on purpose


def degrees(**sizes: int) -> ParallelState:
    """Degrees by name; `ep` among them."""
    ep = sizes.pop("ep", 1)
    return ParallelState(**sizes, extra_parallel_sizes=ExtraParallelSizes.of(ep=ep))


PROBES = (
    [
        Probe(part=name, feature=feature, construct=make(**settings))
        for name, make in (("engine-fsdp", fsdp), ("engine-veomni", veomni))
        for feature, settings in (
            ("bfloat16 compute, float32 master weights", {"compute_dtype": "bfloat16"}),
            ("float32 compute", {"compute_dtype": "float32"}),
            ("temperature", {"temperature": 0.7}),
            (
                "activation checkpointing",
                {"activation_checkpointing": "full" if name == "engine-fsdp" else True},
            ),
            ("sharded data parallel", {"parallel": degrees(dp_size=2)}),
            ("HSDP", {"parallel": degrees(dp_size=4, dp_replicate_size=2)}),
            ("expert parallel", {"parallel": degrees(dp_size=2, ep=2)}),
            ("Ulysses sequence parallel", {"parallel": degrees(ulysses_size=2)}),
            ("tensor parallel", {"parallel": degrees(tensor_size=2)}),
            ("pipeline parallel", {"parallel": degrees(pipeline_size=2)}),
        )
    ]
    + [
        Probe(part="engine-fsdp", feature=feature, construct=fsdp(**settings))
        for feature, settings in (
            ("selective activation checkpointing", {"activation_checkpointing": "selective"}),
            ("compiled blocks, on GPUs", {"compile_blocks": True}),
            ("compiled blocks in float32", {"compile_blocks": True, "compute_dtype": "float32"}),
            ("parameters in host memory, on GPUs", {"offload": "parameters"}),
            (
                "inputs of blocks in host memory, on GPUs",
                {"offload_activations": True, "activation_checkpointing": "full"},
            ),
            (
                "inputs of blocks in host memory, without full checkpointing",
                {"offload_activations": True},
            ),
            ("linear and cosine schedules", {"optim": COSINE}),
            ("Muon for the matrices of the blocks", {"muon": MuonConfig()}),
            (
                "Muon with parameters in host memory",
                {"muon": MuonConfig(), "offload": "parameters"},
            ),
            ("AdamW with moments in 8 bits (torchao)", {"eight_bit_moments": True}),
            (
                "moments in 8 bits with parameters in host memory",
                {"eight_bit_moments": True, "offload": "parameters"},
            ),
            ("moments in 8 bits beside Muon", {"eight_bit_moments": True, "muon": MuonConfig()}),
            ("LoRA adapters, merged or apart (peft)", {"lora": LoraConfig()}),
            ("LoRA with compiled blocks", {"lora": LoraConfig(), "compile_blocks": True}),
            ("LoRA with Muon", {"lora": LoraConfig(), "muon": MuonConfig()}),
            ("frozen weights", {"freeze": ("model.embed_tokens.*",)}),
            ("skipping steps that are not finite", {"on_non_finite": "skip"}),
            ("two runs the same bit for bit", {"deterministic": True}),
            ("deterministic compiled blocks", {"deterministic": True, "compile_blocks": True}),
        )
    ]
    + [
        Probe(part="engine-veomni", feature=feature, construct=veomni(**settings))
        for feature, settings in (
            ("parameters in host memory, on GPUs", {"offload": "parameters"}),
            ("replay of routes, of its own logprobs", {"router_replay": "logprobs"}),
            ("replay of routes, of the sampler", {"router_replay": "rollout"}),
            ("load-balancing loss", {"router_aux_loss_coef": 0.001}),
            ("router statistics", {"router_statistics": True}),
            (
                "prompts with images, the vision tower frozen (Qwen3-VL, Qwen3-VL-MoE)",
                {"freeze_vision": True},
            ),
        )
    ]
    + [
        Probe(part="rl-contracts", feature=feature, construct=optim(**settings))
        for feature, settings in (
            ("a schedule whose end is not known", {"schedule": "cosine"}),
            ("an end without a schedule", {"total_steps": 100}),
        )
    ]
    + [
        Probe(part="rollout-vllm", feature=feature, construct=vllm(**settings))
        for feature, settings in (
            ("bfloat16, float16, float32", {"dtype": "float32"}),
            ("prefix caching on, off, or vLLM's choice", {"enable_prefix_caching": False}),
            ("chunked prefill on, off, or vLLM's choice", {"enable_chunked_prefill": False}),
            ("compiled graphs", {"enforce_eager": False}),
            ("tensor parallel", {"tensor_parallel_size": 2}),
            ("data parallel", {"data_parallel_size": 2}),
            ("routers' decisions returned", {"return_routed_experts": True}),
            ("sleep", {"enable_sleep": True}),
            ("compiled graphs, on GPUs", {"device": "cuda", "enforce_eager": False}),
            ("tensor parallel, on GPUs", {"device": "cuda", "tensor_parallel_size": 2}),
            ("data parallel, on GPUs", {"device": "cuda", "data_parallel_size": 2}),
            (
                "expert parallel, on GPUs",
                {"device": "cuda", "tensor_parallel_size": 2, "expert_parallel_size": 2},
            ),
            (
                "routers' decisions returned, on GPUs",
                {"device": "cuda", "return_routed_experts": True},
            ),
            ("sleep, on GPUs", {"device": "cuda", "enable_sleep": True}),
            ("prompts with images", {"images_per_prompt": 1}),
            ("OpenAI-compatible server, on loopback", {"server": ServerConfig()}),
            ("pipeline parallel", {"pipeline_parallel_size": 2}),
            ("speculative decoding by n-grams", {"speculation": GUESSES}),
            ("fp8 with a scale per channel", {"quantization": "fp8_per_channel"}),
            ("fp8 with a scale per tensor", {"quantization": "fp8_per_tensor"}),
            ("another rotary embedding", {"hf_overrides": {"rope_parameters": YARN}}),
            ("other sizes of the model", {"hf_overrides": {"hidden_size": 64}}),
            ("adapters (LoRA) as updates", {"lora": ADAPTERS}),
            ("adapters beside fp8", {"lora": ADAPTERS, "quantization": "fp8_per_channel"}),
            ("adapters, on GPUs", {"device": "cuda", "lora": ADAPTERS}),
            ("pipeline parallel, on GPUs", {"device": "cuda", "pipeline_parallel_size": 2}),
            ("speculative decoding, on GPUs", {"device": "cuda", "speculation": GUESSES}),
            ("fp8, on GPUs", {"device": "cuda", "quantization": "fp8_per_channel"}),
            (
                "expert parallel by vLLM's own flag",
                {"engine_args": {"enable_expert_parallel": True}},
            ),
        )
    ]
    + [
        Probe(
            part="rollout-vllm",
            feature="server on the network without a key",
            construct=lambda: ServerConfig(host="0.0.0.0"),  # noqa: S104  # what is refused
        )
    ]
    + [
        Probe(part="algos-gspo-dapo-grpo", feature=feature, construct=construct)
        for feature, construct in (
            (
                "grpo with KL, dual clip and rollout correction",
                lambda: GrpoLoss(
                    kl=KlPenalty(coefficient=0.04),
                    dual_clip=3.0,
                    rollout_correction=TokenTruncation(),
                ),
            ),
            *((loss.kind, loss) for loss in get_args(PolicyLoss)),
            ("k1 as a loss", lambda: KlPenalty(coefficient=0.1, estimator="k1")),  # type: ignore[arg-type]
        )
    ]
)


def row(probe: Probe) -> str:
    """One line of the table."""
    try:
        probe.construct()
    except (TypeError, ValueError) as error:
        answer = f"refused: {error}"
    else:
        answer = "yes"
    return f"| {probe.part} | {probe.feature} | {' '.join(answer.split()).replace('|', '/')} |"


def page() -> str:
    """The whole page."""
    return HEADER + "\n".join(row(probe) for probe in PROBES) + "\n"


if __name__ == "__main__":
    print(page(), end="")
