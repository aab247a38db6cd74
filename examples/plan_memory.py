"""Memory of one device: what the trainer takes of it at its peak, and what the sampler takes.

engine_fsdp.plan counts what a dense model keeps, by running it on tensors without data; here it
runs on one layer of the model and on two, which say what every further one adds. What it does not
run (experts, float32, compiled blocks, engine-veomni) has a formula, in bytes per token and layer.
"""

import functools
import json
import math
import tempfile
from pathlib import Path
from typing import Final, final

import attrs
from plan_model import ModelFacts
from plan_optimizer import moment_bytes, trained_weights

from engine_fsdp import FsdpConfig, MemoryPlan, plan
from engine_fsdp.config import ActivationCheckpointing
from engine_veomni import VeomniConfig
from rl_contracts import OptimConfig
from rollout_vllm import VllmConfig

GIB: Final = 2**30

EngineConfig = FsdpConfig | VeomniConfig

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

_AT_WORK: Final = 3
"""Blocks that are gathered at a time; see engine_fsdp.planning."""

_SMALL_VOCAB: Final = 128
_LIBRARY_BYTES: Final = 2**26
_CHUNK_BYTES: Final = 2**31
"""float32 logits of the rows of the head that are computed together, in both engines."""

SAMPLER_RUNTIME_BYTES: Final = 3 * GIB
"""Of vLLM beside weights, cache and activations: CUDA context, graphs, communication. Assumed."""

SLEEPING_SAMPLER_BYTES: Final = 2 * GIB
"""What stays of it on the device while it sleeps: context and graphs. Assumed."""


@final
@attrs.frozen(kw_only=True)
class TrainerMemory:
    """Bytes of one device at the moment when a training step takes most."""

    weights: int
    gradient: int
    moments: int

    gathered: int
    """Whole weights in the type of the computation."""

    activations: int
    """What the blocks keep for the backward pass."""

    head: int
    """What the head keeps for it."""

    working: int
    """The most that comes on top at any time."""

    library: int

    num_micro_batches: int
    """With one alone there is no gradient yet when the activations are most."""

    host: int
    """In the host's memory, for each device, while a sampler has the device or at all times."""

    inputs_on_host: int
    """Inputs of blocks that wait there beside that, for each device."""

    @property
    def peak(self) -> int:
        """The most at any time."""
        resident = self.weights + self.moments + self.gathered + self.library
        if self.num_micro_batches > 1:
            return resident + self.gradient + self.activations + self.head + self.working
        at_first = resident + self.activations + self.head + self.working
        return max(at_first, resident + self.gradient + self.working)

    @property
    def between_steps(self) -> int:
        """While nothing is computed: no gradient, no whole weights."""
        return self.weights + self.moments + self.library

    def rows(self) -> dict[str, int]:
        """What is there at the peak, by name; sums to it."""
        kept = self.activations + self.head
        is_late = self.num_micro_batches == 1 and self.gradient > kept
        is_early = self.num_micro_batches == 1 and not is_late
        return {
            "weights": self.weights,
            "gradient": 0 if is_early else self.gradient,
            "moments": self.moments,
            "gathered weights": self.gathered,
            "activations": 0 if is_late else self.activations,
            "logits kept": 0 if is_late else self.head,
            "working": self.working,
            "library": self.library,
        }


@final
@attrs.frozen(kw_only=True)
class SamplerMemory:
    """Bytes of one of the sampler's devices."""

    weights: int
    cache: int
    """What is left for it; negative if nothing is."""

    workspace: int

    cache_bytes_per_token: int

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + max(0, self.cache) + self.workspace

    def num_sequences(self, mean_tokens: float) -> int:
        """Sequences of this mean length that the cache of one engine holds."""
        return max(0, int(self.cache / (self.cache_bytes_per_token * max(1.0, mean_tokens))))


def can_park(engine: EngineConfig) -> bool:
    """Whether the engine gives its device memory to a sampler between steps."""
    return engine.offload == "none"


def uses_plan(engine: EngineConfig, model: ModelFacts) -> bool:
    """Whether engine_fsdp.plan counts what is kept; else formulas do."""
    return (
        isinstance(engine, FsdpConfig)
        and not model.has_experts
        and engine.compute_dtype == "bfloat16"
    )


def trainer_memory(
    engine: EngineConfig, model: ModelFacts, *, tokens: int, num_micro_batches: int
) -> TrainerMemory:
    """Of a step after the first, in which every token but the prompt's is scored.

    Args:
        engine: of the trainer.
        model: that is trained.
        tokens: of the largest micro-batch, before it is shared among the ranks of Ulysses.
        num_micro_batches: of a step, on each rank.
    """
    shards = engine.parallel.fsdp_size
    shared = -(-tokens // engine.parallel.ulysses_size)
    is_offloaded = engine.offload == "parameters"
    total = model.counts.total
    trained, moments = trained_weights(engine, model), moment_bytes(engine, model)
    kept, head, working = (
        _kept_by_plan(engine, model, shared)
        if isinstance(engine, FsdpConfig) and uses_plan(engine, model)
        else _kept_by_formula(engine, model, shared)
    )
    resident = (4 * (total + trained) + moments) // shards
    return TrainerMemory(
        weights=0 if is_offloaded else 4 * total // shards,
        gradient=0 if is_offloaded else 4 * trained // shards,
        moments=0 if is_offloaded else moments // shards,
        gathered=_gathered(engine, model),
        activations=kept,
        head=head,
        working=working,
        library=_LIBRARY_BYTES,
        num_micro_batches=num_micro_batches,
        host=resident if is_offloaded else (4 * total + moments) // shards,
        inputs_on_host=_inputs_on_host(engine, model, shared),
    )


def _inputs_on_host(engine: EngineConfig, model: ModelFacts, tokens: int) -> int:
    """Pinned buffers, one for each block, whose sizes torch rounds up; see `FsdpConfig`."""
    if isinstance(engine, VeomniConfig) or not engine.offload_activations:
        return 0
    one = tokens * model.hidden_size * DTYPE_BYTES[engine.compute_dtype]
    return model.num_hidden_layers << (one - 1).bit_length()


def _gathered(engine: EngineConfig, model: ModelFacts) -> int:
    """Whole weights in the type of the computation, as FSDP2 holds them."""
    element = DTYPE_BYTES[engine.compute_dtype]
    counts = model.counts
    blocks = counts.total - counts.embedding - counts.head - model.hidden_size
    outside = counts.total - blocks
    if isinstance(engine, FsdpConfig):
        at_work = blocks
        if engine.parallel.fsdp_size > 1:
            at_work = min(blocks, _AT_WORK * model.block)
        return element * (outside + at_work)
    # experts of a rank are a slice of a layer's, and have FSDP groups of their own
    experts = counts.experts // max(1, model.num_sparse_layers)
    local = experts // engine.parallel.extra_parallel_sizes["ep"]
    return element * (outside + _AT_WORK * (model.block - experts + local))


def _kept_by_plan(engine: FsdpConfig, model: ModelFacts, tokens: int) -> tuple[int, int, int]:
    """What blocks keep, what the head keeps, and what works, of a dense model."""
    checkpointing = engine.activation_checkpointing
    layers = model.num_hidden_layers

    def of_slice(num_layers: int, kind: ActivationCheckpointing, vocab: int) -> MemoryPlan:
        settings = {**model.config, "num_hidden_layers": num_layers, "vocab_size": vocab}
        settings.pop("layer_types", None)  # one per layer
        text = json.dumps(settings, sort_keys=True)
        on_host = engine.offload_activations
        return _plan_of(text, kind, engine.kept_logits_gib, tokens, on_host=on_host)

    if engine.offload_activations:  # the device holds two inputs however many blocks there are
        few = of_slice(min(layers, 2), checkpointing, model.vocab_size)
        return few.activations, few.head, few.working

    one, two = (of_slice(few, checkpointing, model.vocab_size) for few in (1, 2))
    per_layer = two.activations - one.activations
    kept, head, working = one.activations + (layers - 1) * per_layer, one.head, one.working
    if two.working != working:
        # With so few layers most is taken at the end, by the gradient of the embedding; with many
        # by the head, or by a block that is computed again.
        of_head = of_slice(2, "none", model.vocab_size).working
        of_block = of_slice(2, checkpointing, _SMALL_VOCAB).working
        at_end = two.activations + two.head + two.working
        working = max(of_head, of_block, at_end - kept - head)
    if engine.compile_blocks and checkpointing == "none":
        kept = tokens * _compiled_bytes(model) * layers
    return kept, head, working


@functools.cache
def _plan_of(
    config: str,
    checkpointing: ActivationCheckpointing,
    kept_logits_gib: float,
    tokens: int,
    *,
    on_host: bool,
) -> MemoryPlan:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config, encoding="utf-8")
        return plan(
            FsdpConfig(
                model_path=folder,
                optim=OptimConfig(learning_rate=1e-6),
                activation_checkpointing=checkpointing,
                offload_activations=on_host,
                kept_logits_gib=kept_logits_gib,
            ),
            tokens=tokens,
        )


def _compiled_bytes(model: ModelFacts) -> int:
    """Per token and layer of a compiled block that is not checkpointed.

    In bfloat16: its input, both normed inputs, the sum in between; queries, keys and values before
    and after norm and rotation, attention's result; both halves of the MLP and their product.
    """
    elements = (
        4 * model.hidden_size
        + 3 * model.query_size
        + 3 * model.key_value_size
        + 3 * model.intermediate_size
    )
    return 2 * elements


def _kept_by_formula(engine: EngineConfig, model: ModelFacts, tokens: int) -> tuple[int, int, int]:
    """The same three for experts, float32 and engine-veomni."""
    element = DTYPE_BYTES[engine.compute_dtype]
    layer = tokens * _layer_elements(engine, model) * element
    per_layer, layers = layer, model.num_hidden_layers
    match engine.activation_checkpointing:
        case True | "full":
            per_layer = tokens * model.hidden_size * element
        case "selective":
            per_layer = layer // 3  # 28 % of what a dense model keeps, by engine_fsdp.plan
        case _:
            pass
    if isinstance(engine, FsdpConfig) and engine.offload_activations:
        layers = 1  # the input that left last, or comes next
    rows = _CHUNK_BYTES // (4 * model.vocab_size)
    logits = rows * model.vocab_size
    head, in_head = 0, 2 * element * logits
    if isinstance(engine, FsdpConfig):
        head = int(min(engine.kept_logits_gib * GIB, tokens * model.vocab_size * element))
    else:
        in_head = (4 + 4 + 2) * logits  # scaled logits, their softmax, the error
    in_head += 4 * model.vocab_size * model.hidden_size  # the weights' gradient, added up
    # at the other end of the backward pass: a block computed again, its gradient to be reduced
    recomputed = layer if per_layer < layer else 0
    local = model.block
    if isinstance(engine, VeomniConfig) and model.has_experts:
        experts = model.counts.experts // model.num_sparse_layers
        local -= experts - experts // engine.parallel.extra_parallel_sizes["ep"]
    return (
        per_layer * layers,
        head,
        max(in_head, recomputed + 4 * local),
    )


def _layer_elements(engine: EngineConfig, model: ModelFacts) -> int:
    """Elements that a block keeps per token without checkpointing.

    engine-veomni has fused norms, and its experts keep their rows and the first product
    (engine_veomni.expert_kernel); transformers' blocks keep what engine_fsdp.plan counts in dense
    ones, and of experts also what comes between and after the products.
    """
    hidden, query, kv = model.hidden_size, model.query_size, model.key_value_size
    top_k, inner = model.num_experts_per_tok, model.moe_intermediate_size
    if isinstance(engine, VeomniConfig):
        attention = 4 * hidden + 3 * query + 4 * kv
        mlp = top_k * (hidden + 2 * inner) + 2 * model.num_experts
    else:
        attention = 8 * hidden + 5 * query + 5 * kv
        mlp = top_k * (3 * hidden + 4 * inner) + 2 * model.num_experts
    return attention + (mlp if model.has_experts else 4 * model.intermediate_size)


def sampler_memory(sampler: VllmConfig, model: ModelFacts, *, memory_bytes: int) -> SamplerMemory:
    """Of one of vLLM's devices.

    Weights are split by tensor parallelism, experts by expert parallelism where it is on; the
    norms and the router are on every device.
    """
    element = DTYPE_BYTES[sampler.dtype]
    counts = model.counts
    tensor, expert = sampler.tensor_parallel_size, sampler.expert_parallel_size
    split = counts.embedding + counts.head + counts.attention + counts.dense_mlp
    weights = element * (
        split // tensor
        + counts.experts // (expert if expert > 1 else tensor)
        + counts.router
        + counts.norms
    )
    batch = sampler.max_num_batched_tokens or default_batched_tokens(memory_bytes)
    inner = model.intermediate_size // tensor
    if model.has_experts:
        inner = model.num_experts_per_tok * (2 * model.moe_intermediate_size + model.hidden_size)
    activations = batch * element * (4 * model.hidden_size + 2 * inner)
    rows = max_sequences(sampler, memory_bytes)
    logits = rows * model.vocab_size * (4 + 4)  # float32, and their softmax
    workspace = SAMPLER_RUNTIME_BYTES + activations + logits
    if sampler.device == "cpu":
        workspace = activations + logits
    if sampler.kv_cache_gib is not None:
        cache = int(sampler.kv_cache_gib * GIB)
    else:
        assert sampler.gpu_memory_utilization is not None  # noqa: S101  # VllmConfig checks
        cache = math.floor(sampler.gpu_memory_utilization * memory_bytes) - weights - workspace
    return SamplerMemory(
        weights=weights,
        cache=cache,
        workspace=workspace,
        cache_bytes_per_token=model.kv_bytes_per_token(
            tensor_parallel_size=tensor, element_bytes=element
        ),
    )


def max_sequences(sampler: VllmConfig, memory_bytes: int) -> int:
    """Requests decoded at once by one engine; vLLM's defaults (0.32, engine/arg_utils.py)."""
    if sampler.max_num_seqs is not None:
        return sampler.max_num_seqs
    if sampler.device == "cpu":
        return 64
    return 1024 if memory_bytes >= 70 * GIB else 256


def default_batched_tokens(memory_bytes: int) -> int:
    """Tokens of one step of vLLM where none are given; as above."""
    return 16384 if memory_bytes >= 70 * GIB else 8192
