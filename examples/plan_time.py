"""Seconds of a training step, and of bringing the weights to the sampler.

Training is bound by products: six operations per weight and token, and attention, at a share of
what a large product reaches. The shares are those of runs on H200s, named below.
"""

import math
from typing import Final, NamedTuple, final

import attrs
from plan_device import DeviceFacts
from plan_memory import DTYPE_BYTES, EngineConfig, TrainerMemory
from plan_model import ModelFacts

from engine_fsdp import FsdpConfig
from engine_veomni import VeomniConfig

COMPILED_SHARE: Final = 0.723
"""Of a product's rate, by layers and head of engine-fsdp with compiled blocks: Qwen3-1.7B, 16 x
2048 tokens on one H200, optimizer and recomputed logits apart (fsdp_train.json)."""

UNCOMPILED_SHARES: Final = (0.40, 0.62)
"""The same without `compile_blocks`. Not measured on its own; assumed."""

MIXTURE_SHARES: Final[dict[tuple[str, bool, bool], float]] = {
    ("grouped_mm", True, False): 0.265,
    ("grouped_mm", False, False): 0.280,
    ("grouped_mm", True, True): 0.215,
    ("veomni", True, True): 0.164,
    ("veomni", False, True): 0.209,
}
"""Of a product's rate, by the layers of engine-veomni, by kernel, whether experts are spread over
ranks, and whether activations are checkpointed (veomni_step.json: layers of Qwen3-30B-A3B, 8 x 2048
tokens on each of two H200; head at `COMPILED_SHARE`, its logits computed again, optimizer apart).
What checkpointing computes again is not counted as work."""

CHECKPOINTED: Final = (
    MIXTURE_SHARES["grouped_mm", True, True] / MIXTURE_SHARES["grouped_mm", True, False]
)
"""For combinations of the table that were not measured."""

_SPREAD: Final = 0.15
"""How far either way from a measured share a prediction is given."""

_OPTIMIZER_BYTES: Final = 28
"""Read and written per weight: weight, gradient, two moments; three of them come back."""

_MEMORY_SHARE: Final = 0.8
"""Of the published bandwidth, by one long pass over memory. Assumed."""

SHARED_BYTES_PER_S: Final = 87.6e9
"""Of a weight update within one GPU: Qwen3-30B-A3B, 0.70 s from the first export to the first
token (weight_update_30b_a3b_h200.json)."""

STREAM_SHARE: Final = 259.5 / 208.0
"""Of a device's all-gather rate, by a stream from one H200 to another (weight_stream_8b_2xh200.json
and veomni_step.json)."""

EXPORT_SHARE: Final = (41.7 / 208.0, 51.9 / 208.0)
"""Of a device's all-gather rate, by an export that gathers one tensor per expert
(veomni_step.json)."""


class Seconds(NamedTuple):
    """A range."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """What layouts are compared by."""
        return math.sqrt(self.low * self.high)

    def plus(self, other: "Seconds") -> "Seconds":
        """One after the other."""
        return Seconds(self.low + other.low, self.high + other.high)

    def beside(self, other: "Seconds") -> "Seconds":
        """Both at once."""
        return Seconds(max(self.low, other.low), max(self.high, other.high))

    def __str__(self) -> str:
        return f"{figure(self.low)} to {figure(self.high)} s"


NO_TIME: Final = Seconds(0.0, 0.0)


def figure(value: float) -> str:
    """Two digits at least, as plain text."""
    if value <= 0:
        return "0"
    return f"{value:,.{max(0, 1 - math.floor(math.log10(value)))}f}"


@final
@attrs.frozen(kw_only=True)
class Workload:
    """What one step samples and trains on."""

    num_sequences: int
    """Groups times group size."""

    prompt_tokens: float
    """Of a prompt, mean."""

    completion_tokens: float
    """Of a completion, mean."""

    max_tokens: int
    """Of the longest sequence that is allowed."""

    in_flight: int
    """Sequences that are sampled at the same time, over all samplers."""

    group_size: int
    """Sequences of one prompt."""

    logprob_passes: int
    """Passes without gradient over the batch: the reference's, and the policy's own if asked."""

    micro_batch_tokens: int
    """The most tokens of a forward pass."""

    @property
    def mean_tokens(self) -> float:
        """Of a sequence."""
        return self.prompt_tokens + self.completion_tokens

    def micro_batches(self, data_ranks: int) -> int:
        """Of a step, on each rank that reads data of its own."""
        tokens = self.num_sequences * self.mean_tokens / data_ranks
        return max(1, math.ceil(tokens / self.micro_batch_tokens))


def operations_per_token(model: ModelFacts, length: float) -> tuple[float, float]:
    """Of a forward and backward pass, in the layers and in the head; causal attention.

    The same count as in benchmarks/fsdp_train.py and veomni_step.py.
    """
    attention = 6 * model.num_hidden_layers * model.query_size * length
    return 6 * model.multiplied_in_layers + attention, 6.0 * model.vocab_size * model.hidden_size


def layer_shares(engine: EngineConfig, model: ModelFacts) -> tuple[float, float]:
    """The least and the most of a product's rate that the layers are taken to reach."""
    if isinstance(engine, FsdpConfig):
        low, high = _fsdp_shares(engine, model)
    elif model.has_experts:
        share = _mixture_share(engine)
        low, high = share * (1 - _SPREAD), share * (1 + _SPREAD)
    else:
        low, high = UNCOMPILED_SHARES
        if engine.activation_checkpointing:
            low, high = low * CHECKPOINTED, high * CHECKPOINTED
    if engine.compute_dtype == "float32":
        return low / 20, high / 8  # "exact, and slow": engine-fsdp's README
    return low, high


def _mixture_share(engine: VeomniConfig) -> float:
    is_spread = engine.parallel.extra_parallel_sizes["ep"] > 1
    kernel, recomputes = engine.expert_kernel, engine.activation_checkpointing
    share = MIXTURE_SHARES.get((kernel, is_spread, recomputes))
    if share is not None:
        return share
    other = MIXTURE_SHARES[kernel, is_spread, not recomputes]
    return other * (CHECKPOINTED if recomputes else 1 / CHECKPOINTED)


def _fsdp_shares(engine: FsdpConfig, model: ModelFacts) -> tuple[float, float]:
    recompute = {"none": 1.0, "selective": 6 / 7, "full": 6 / 8}[engine.activation_checkpointing]
    low, high = UNCOMPILED_SHARES
    if model.has_experts:
        # at best as engine-veomni without expert parallelism
        high = MIXTURE_SHARES["grouped_mm", False, False]
        low = high / 2
    elif engine.compile_blocks:
        low, high = COMPILED_SHARE * (1 - _SPREAD), COMPILED_SHARE * (1 + _SPREAD)
    return low * recompute, high * recompute


def training_seconds(
    engine: EngineConfig, model: ModelFacts, device: DeviceFacts, work: Workload
) -> Seconds:
    """Of a step's forward and backward passes, its other passes, and the optimizer."""
    ranks = engine.parallel.world_size
    tokens = work.num_sequences * work.mean_tokens / ranks
    layers, head = operations_per_token(model, work.mean_tokens)
    passes = 1 + (work.logprob_passes + _counting_passes(engine)) / 3
    head_factor = _head_factor(engine, model, work)
    bounds = []
    for share in layer_shares(engine, model):
        per_token = layers / share + head * head_factor / max(share, COMPILED_SHARE)
        bounds.append(tokens * passes * per_token / device.product_flops)
    communication = communication_seconds(engine, model, device, work)
    on_host = engine.offload == "parameters"
    shard = model.counts.total / engine.parallel.fsdp_size
    rate = 20e9 if on_host else device.memory_bytes_per_s * _MEMORY_SHARE
    optimizer = _OPTIMIZER_BYTES * shard / rate
    return Seconds(
        max(bounds[1], communication) + optimizer, max(bounds[0], 1.5 * communication) + optimizer
    )


def _counting_passes(engine: EngineConfig) -> int:
    """Passes without gradient that only count what the routers choose."""
    return int(
        isinstance(engine, VeomniConfig)
        and engine.router_aux_loss_coef > 0.0
        and engine.router_replay == "none"
    )


def _head_factor(engine: EngineConfig, model: ModelFacts, work: Workload) -> float:
    """Work of the head over that of a head whose logits are kept."""
    if isinstance(engine, VeomniConfig):
        return 4 / 3
    element = DTYPE_BYTES[engine.compute_dtype]
    tokens = work.micro_batch_tokens / engine.parallel.ulysses_size
    tokens = min(tokens, work.num_sequences * work.mean_tokens / engine.parallel.world_size)
    all_bytes = tokens * model.vocab_size * element
    return 1 + (1 - min(1.0, engine.kept_logits_gib * 2**30 / all_bytes)) / 3


def communication_seconds(
    engine: EngineConfig, model: ModelFacts, device: DeviceFacts, work: Workload
) -> float:
    """Gathers and reductions of FSDP, exchanges of experts and of Ulysses, without any overlap."""
    parallel = engine.parallel
    shards, element = parallel.fsdp_size, DTYPE_BYTES[engine.compute_dtype]
    rate = device.gather_bytes_per_s
    if shards > device.devices_per_node:
        rate = min(rate, device.network_bytes_per_s)
    micro_batches = work.micro_batches(parallel.dp_size)
    counts = model.counts
    ep = parallel.extra_parallel_sizes.as_dict().get("ep", 1)
    # experts of a rank are gathered among fewer ranks, and nothing is gathered among one
    sharded = (counts.total - counts.experts) * (1 - 1 / shards)
    sharded += counts.experts / ep * (1 - ep / shards)
    per_micro_batch = sharded * (2 * element + 4 + work.logprob_passes * element)
    # copies add up their shards of the gradient, in a ring that goes from node to node
    copies, between = parallel.dp_replicate_size, rate
    if parallel.world_size > device.devices_per_node:
        between = min(rate, device.network_bytes_per_s)
    added_up = 2 * 4 * counts.total / shards * (1 - 1 / copies)
    tokens = work.num_sequences * work.mean_tokens / parallel.world_size
    exchanged = 0.0
    if ep > 1:
        rows = tokens * model.num_experts_per_tok * model.num_sparse_layers
        exchanged += 4 * rows * model.hidden_size * element * (1 - 1 / ep)
    if parallel.ulysses_size > 1:
        width = 2 * model.query_size + 2 * model.key_value_size
        exchanged += 2 * tokens * model.num_hidden_layers * width * element
    seconds = (per_micro_batch * micro_batches + exchanged) / rate
    seconds += added_up * micro_batches / between
    if engine.offload == "parameters":
        moved = (2 * element + 4) * counts.total / shards * micro_batches
        seconds += moved / device.host_bytes_per_s
    return seconds


@final
@attrs.frozen(kw_only=True)
class WeightUpdate:
    """One trip of the weights from the trainer to the samplers."""

    num_bytes: int
    """In the type of the export, each weight once."""

    bytes_per_s: float
    """Of the way from trainer to sampler."""

    seconds: Seconds


def update_of(
    engine: EngineConfig,
    model: ModelFacts,
    device: DeviceFacts,
    *,
    colocated: bool,
    num_devices: int,
) -> WeightUpdate:
    """Export and stream overlap at best.

    Args:
        engine: that exports.
        model: whose weights travel.
        device: of trainer and sampler.
        colocated: whether the sampler is on the same devices.
        num_devices: of trainer and samplers together.
    """
    num_bytes = model.counts.total * DTYPE_BYTES[engine.resolved_export_dtype]
    scale = device.memory_bytes_per_s / 4.8e12
    rate = SHARED_BYTES_PER_S * scale if colocated else device.gather_bytes_per_s * STREAM_SHARE
    shards = engine.parallel.fsdp_size
    link = device.gather_bytes_per_s
    if shards > device.devices_per_node:
        link = min(link, device.network_bytes_per_s)
    if not colocated and num_devices > device.devices_per_node:
        rate = min(rate, device.network_bytes_per_s)
    received = num_bytes * (1 - 1 / shards)
    slow, fast = (received / (link * share) for share in EXPORT_SHARE)
    carried = num_bytes / rate
    return WeightUpdate(
        num_bytes=num_bytes,
        bytes_per_s=rate,
        seconds=Seconds(max(fast, carried), slow + carried + 0.3),
    )


def parking_seconds(memory: TrainerMemory, device: DeviceFacts) -> Seconds:
    """To the host and back, once the host's memory is pinned."""
    once = memory.between_steps / device.host_bytes_per_s
    return Seconds(2 * once, 3 * once)
