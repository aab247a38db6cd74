"""Seconds that sampling takes: reading weights and cache from memory, token by token.

No sampler's throughput on a GPU has been measured here, so the time is a wide range, between shares
that are assumed.
"""

import math
from typing import Final, final

import attrs
from plan_device import DeviceFacts
from plan_memory import DTYPE_BYTES, SamplerMemory, max_sequences
from plan_model import ModelFacts
from plan_time import Seconds, Workload

from rollout_vllm import VllmConfig

_DECODE_SHARES: Final = (0.45, 0.80)
"""Of the published bandwidth, by reading weights and cache in vLLM. Assumed."""

_PREFILL_SHARES: Final = (0.30, 0.60)
"""Of a product's rate, by prompts in vLLM. Assumed."""

_GRAPH_STEP_S: Final = (0.002, 0.006)
"""Host time of a decoding step of vLLM with compiled graphs. Assumed."""

_EAGER_LAYER_S: Final = (0.0003, 0.0007)
"""Host time of a layer without them. Assumed."""

_REDUCE_S: Final = 15e-6
"""Latency of one all-reduce of tensor parallelism. Assumed."""


@final
@attrs.frozen(kw_only=True)
class Sampling:
    """How a step is sampled."""

    seconds: Seconds

    concurrent: int
    """Sequences that one engine decodes at a time."""

    is_bound_by_cache: bool
    """Whether the cache, and nothing else, keeps more from running."""


@final
@attrs.frozen(kw_only=True)
class SamplingJob:
    """Who samples what."""

    sampler: VllmConfig

    memory: SamplerMemory
    """Of one of its devices."""

    model: ModelFacts
    device: DeviceFacts
    work: Workload

    num_engines: int
    """That share the sequences, replicas and data-parallel ones alike."""

    waits_for_all: bool
    """Whether the step waits for its longest sequence; else others run meanwhile."""


def sampling_seconds(job: SamplingJob) -> Sampling:
    """Of all completions of a step."""
    work = job.work
    fits = job.memory.num_sequences(work.mean_tokens)
    wanted = max(1, math.ceil(min(work.in_flight, work.num_sequences) / job.num_engines))
    limit = min(wanted, max_sequences(job.sampler, job.device.memory_bytes))
    concurrent = max(1, min(limit, fits))
    num_steps = work.num_sequences / job.num_engines * work.completion_tokens / concurrent
    low, high = (
        num_steps * _decode_step(job, concurrent, is_worst=is_worst)
        + _prefill(job, is_worst=is_worst)
        for is_worst in (False, True)
    )
    if job.waits_for_all:
        # the last ones run nearly alone to the end of what is allowed
        alone = _decode_step(job, min(8, concurrent), is_worst=False)
        high += max(0.0, work.max_tokens - work.mean_tokens) * alone
    return Sampling(
        seconds=Seconds(low, high), concurrent=concurrent, is_bound_by_cache=fits < limit
    )


def _prefill(job: SamplingJob, *, is_worst: bool) -> float:
    """Prompts of one engine; samples of a group share theirs at best."""
    prompts = job.work.num_sequences / job.num_engines
    if not is_worst:
        prompts /= job.work.group_size
    operations = 2 * job.model.active * job.work.prompt_tokens * prompts
    rate = job.device.product_flops * _PREFILL_SHARES[0 if is_worst else 1]
    return operations / (rate * job.sampler.tensor_parallel_size)


def _decode_step(job: SamplingJob, sequences: int, *, is_worst: bool) -> float:
    """One token of each of these sequences: the larger of reading and multiplying."""
    device, model, end = job.device, job.model, 0 if is_worst else 1
    read = _weights_read(job, sequences)
    context = job.work.prompt_tokens + job.work.completion_tokens / 2
    read += sequences * context * job.memory.cache_bytes_per_token
    reading = read / (device.memory_bytes_per_s * _DECODE_SHARES[end])
    tensor = job.sampler.tensor_parallel_size
    products = _PREFILL_SHARES[end] * device.product_flops
    multiplying = 2 * model.active * sequences / tensor / products
    host = _GRAPH_STEP_S[is_worst]
    if _is_eager(job.sampler):
        host = _EAGER_LAYER_S[is_worst] * model.num_hidden_layers
    reduce = 0.0
    if tensor > 1:
        num_bytes = sequences * model.hidden_size * DTYPE_BYTES[job.sampler.dtype]
        once = _REDUCE_S + 2 * num_bytes / device.gather_bytes_per_s
        reduce = 2 * model.num_hidden_layers * once
    return max(reading, multiplying) + host + reduce


def _is_eager(sampler: VllmConfig) -> bool:
    if sampler.enforce_eager is None:
        return sampler.device == "cpu"
    return sampler.enforce_eager


def _weights_read(job: SamplingJob, sequences: int) -> float:
    """Bytes of weights that a device reads for one token of each sequence.

    Of the embedding a row per token; of the experts those that any of the tokens goes to, if all
    are as likely.
    """
    sampler, model = job.sampler, job.model
    element, counts = DTYPE_BYTES[sampler.dtype], model.counts
    table = 0 if model.tie_word_embeddings else counts.embedding
    read = element * (counts.total - counts.experts - table) / sampler.tensor_parallel_size
    if not model.has_experts:
        return read
    together = sequences
    if sampler.expert_parallel_size > 1:
        together *= sampler.data_parallel_size
    visited = 1 - (1 - model.num_experts_per_tok / model.num_experts) ** together
    spread = max(sampler.tensor_parallel_size, sampler.expert_parallel_size)
    return read + element * counts.experts * visited / spread
