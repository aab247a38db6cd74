"""Other ways to lay out the same run: those that may be better, and small changes that may fit."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar, final

import attrs
from plan_memory import EngineConfig
from plan_model import ModelFacts

from engine_fsdp import FsdpConfig
from engine_fsdp.config import ActivationCheckpointing, Offload
from engine_veomni import VeomniConfig
from parallel_state import ExtraParallelSizes, ParallelState
from rollout_vllm import VllmConfig

EngineT = TypeVar("EngineT", bound=FsdpConfig | VeomniConfig)

MOST_SHARED: Final = 8
"""Ranks of Ulysses, and of the sampler's tensor parallelism: those of a node."""


@final
@attrs.frozen(kw_only=True)
class Candidate:
    """One way to run."""

    engine: EngineConfig
    sampler: VllmConfig

    sampler_replicas: int
    """Samplers of this kind."""

    micro_batch_tokens: int

    @property
    def sampler_devices(self) -> int:
        """Of all samplers."""
        return self.sampler_replicas * self.sampler.num_devices

    def describe(self) -> str:
        """Degrees and what trades memory for time, on one line."""
        return f"{describe_engine(self.engine)}; {self.describe_sampler()}"

    def describe_sampler(self) -> str:
        """Of the sampler alone."""
        sampler = self.sampler
        words = [f"{self.sampler_replicas} x vLLM tp {sampler.tensor_parallel_size}"]
        if sampler.data_parallel_size > 1:
            words.append(f"dp {sampler.data_parallel_size}")
        if sampler.expert_parallel_size > 1:
            words.append(f"ep {sampler.expert_parallel_size}")
        if sampler.gpu_memory_utilization is not None:
            words.append(f"with {sampler.gpu_memory_utilization:.0%} of the memory")
        return " ".join(words)


def describe_engine(engine: EngineConfig) -> str:
    """Of the trainer alone."""
    parallel = engine.parallel
    words = [f"engine-{engine.kind} dp {parallel.dp_size}"]
    if parallel.dp_replicate_size > 1:
        words.append(f"in {parallel.dp_replicate_size} copies")
    if parallel.ulysses_size > 1:
        words.append(f"ulysses {parallel.ulysses_size}")
    if (ep := parallel.extra_parallel_sizes.as_dict().get("ep", 1)) > 1:
        words.append(f"ep {ep}")
    checkpointing = engine.activation_checkpointing
    if checkpointing is True:
        words.append("checkpointed")
    elif checkpointing and checkpointing != "none":
        words.append(f"checkpointing {checkpointing}")
    if isinstance(engine, FsdpConfig) and engine.compile_blocks:
        words.append("compiled")
    if isinstance(engine, FsdpConfig) and engine.offload_activations:
        words.append("inputs on the host")
    if engine.offload != "none":
        words.append("parameters on the host")
    return " ".join(words)


def divisors_up_to(number: int, most: int) -> list[int]:
    """Powers of two that divide `number`."""
    found = [1]
    while found[-1] * 2 <= most and number % (found[-1] * 2) == 0:
        found.append(found[-1] * 2)
    return found


def engines(
    engine: EngineConfig, model: ModelFacts, *, ranks: int, on_cpu: bool
) -> Iterator[Iterator[EngineConfig]]:
    """Layouts of the trainer over so many ranks, simplest first, in stages.

    A later stage is slower wherever an earlier one fits: ranks that share sequences exchange them,
    and parameters on the host have to come from there. What is not a matter of layout (types,
    optimizer, kernels) stays as it is, and what the configurations refuse is left out.
    """
    first = _parallels(engine, model, ranks, shared=[1])
    shared = divisors_up_to(ranks, MOST_SHARED)[1:]
    several = _parallels(engine, model, ranks, shared=shared)
    if isinstance(engine, VeomniConfig):
        yield _spread_out(engine, first, offload="none")
        yield _spread_out(engine, several, offload="none")
        if not on_cpu:
            every = _parallels(engine, model, ranks, shared=[1, *shared])
            yield _spread_out(engine, every, offload="parameters")
        return
    # compiled are blocks on GPUs alone, and of compiled experts nothing is known
    can_compile = not on_cpu and not model.has_experts
    compiled = sorted({engine.compile_blocks, can_compile or engine.compile_blocks})
    yield _laid_out(engine, first, compiled, offload="none")
    yield _laid_out(engine, several, compiled, offload="none")
    if not on_cpu:
        every = _parallels(engine, model, ranks, shared=[1, *shared])
        yield _laid_out(engine, every, compiled, offload="parameters")


def _spread_out(
    engine: VeomniConfig, parallels: Iterator[ParallelState], *, offload: Offload
) -> Iterator[VeomniConfig]:
    return _accepted(
        _evolved(engine, parallel=parallel, offload=offload, activation_checkpointing=recomputes)
        for parallel in parallels
        for recomputes in (False, True)
    )


def _laid_out(
    engine: FsdpConfig,
    parallels: Iterator[ParallelState],
    compiled: Sequence[bool],
    *,
    offload: Offload,
) -> Iterator[FsdpConfig]:
    kinds: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
    return _accepted(
        _evolved(
            engine,
            parallel=parallel,
            offload=offload,
            compile_blocks=compiles,
            activation_checkpointing=kind,
            # their inputs are all that is kept with full checkpointing, and else there is more
            offload_activations=engine.offload_activations and kind == "full",
        )
        for parallel, kind, compiles in itertools.product(parallels, kinds, compiled)
    )


def _accepted(configs: Iterator[EngineT | None]) -> Iterator[EngineT]:
    return (config for config in configs if config is not None)


def _parallels(
    engine: EngineConfig, model: ModelFacts, ranks: int, *, shared: Sequence[int]
) -> Iterator[ParallelState]:
    spread = [1]
    if isinstance(engine, VeomniConfig) and model.has_experts:
        spread = divisors_up_to(ranks, model.num_experts)
    for ulysses in shared:
        for copies in divisors_up_to(ranks // ulysses, ranks):
            for ep in spread:
                try:
                    parallel = ParallelState(
                        dp_size=ranks // ulysses,
                        dp_replicate_size=copies,
                        ulysses_size=ulysses,
                        extra_parallel_sizes=ExtraParallelSizes.of(ep=ep),
                    )
                    parallel.check_model(
                        num_attention_heads=model.num_attention_heads,
                        num_key_value_heads=model.num_key_value_heads,
                        num_experts=model.num_experts or None,
                    )
                except ValueError:
                    continue
                yield parallel


def samplers(sampler: VllmConfig, model: ModelFacts, *, devices: int) -> Iterator[VllmConfig]:
    """Layouts of one sampler; replicas of it fill the devices.

    Where the cache is a share of the memory, smaller shares too: that is room for a trainer.
    """
    if sampler.device == "cpu":
        yield sampler
        return
    shares = [sampler.gpu_memory_utilization]
    if (given := sampler.gpu_memory_utilization) is not None:
        shares += [share for share in (0.6, 0.4) if share < given]
    for tensor in divisors_up_to(devices, MOST_SHARED):
        if model.num_attention_heads % tensor:
            continue
        for expert in sorted({1, tensor}):
            if expert > 1 and (not model.has_experts or model.num_experts % expert):
                continue
            for share in shares:
                yield attrs.evolve(
                    sampler,
                    tensor_parallel_size=tensor,
                    data_parallel_size=1,
                    expert_parallel_size=expert,
                    gpu_memory_utilization=share,
                )


def splits(trainer: int, sampler: int, *, colocated: bool) -> Iterator[tuple[int, int]]:
    """Devices for the trainer and for the samplers: as given, and other quarters of the whole."""
    yield trainer, sampler
    whole = trainer + sampler
    if colocated or whole % 4:
        return
    for quarters in (1, 2, 3):
        if (split := (whole * quarters // 4, whole * (4 - quarters) // 4)) != (trainer, sampler):
            yield split


def small_changes(
    candidate: Candidate, model: ModelFacts, *, colocated: bool
) -> Iterator[tuple[str, Candidate]]:
    """One setting changed, each with its name, those that cost least time first."""
    engine, sampler = candidate.engine, candidate.sampler
    if colocated and not sampler.enable_sleep and sampler.device != "cpu":
        yield (
            "sampler.enable_sleep = true",
            attrs.evolve(candidate, sampler=attrs.evolve(sampler, enable_sleep=True)),
        )
    for name, changed in _engine_changes(engine, model):
        yield name, attrs.evolve(candidate, engine=changed)
    fewer = candidate.micro_batch_tokens // 2
    while fewer >= sampler.max_model_len:
        yield f"{fewer} tokens in a micro-batch", attrs.evolve(candidate, micro_batch_tokens=fewer)
        fewer //= 2
    yield from _sampler_changes(candidate, model)
    on_cpu = sampler.device == "cpu"
    if engine.offload == "none" and not on_cpu:
        offloaded = _evolved(engine, offload="parameters")
        if offloaded is not None:
            yield 'engine.offload = "parameters"', attrs.evolve(candidate, engine=offloaded)


def _engine_changes(engine: EngineConfig, model: ModelFacts) -> Iterator[tuple[str, EngineConfig]]:
    field = "activation_checkpointing"
    if isinstance(engine, VeomniConfig):
        if not engine.activation_checkpointing:
            yield f"engine.{field} = true", attrs.evolve(engine, activation_checkpointing=True)
    else:
        kinds: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
        for kind in kinds[kinds.index(engine.activation_checkpointing) + 1 :]:
            yield f'engine.{field} = "{kind}"', attrs.evolve(engine, activation_checkpointing=kind)
        if engine.kept_logits_gib > 0:
            yield "engine.kept_logits_gib = 0", attrs.evolve(engine, kept_logits_gib=0.0)
    parallel = engine.parallel
    for shared in divisors_up_to(parallel.world_size, MOST_SHARED):
        copies = parallel.dp_replicate_size
        dp_size = parallel.world_size // shared
        if shared <= parallel.ulysses_size or model.num_attention_heads % shared:
            continue
        if dp_size % copies == 0:
            shares = attrs.evolve(parallel, dp_size=dp_size, ulysses_size=shared)
            if (changed := _evolved(engine, parallel=shares)) is not None:
                yield f"engine.parallel.ulysses_size = {shared}", changed


def _sampler_changes(candidate: Candidate, model: ModelFacts) -> Iterator[tuple[str, Candidate]]:
    sampler = candidate.sampler
    if sampler.gpu_memory_utilization is not None:
        for tenths in range(9, 1, -1):
            if (share := tenths / 10) < sampler.gpu_memory_utilization:
                yield (
                    f"sampler.gpu_memory_utilization = {share}",
                    attrs.evolve(
                        candidate, sampler=attrs.evolve(sampler, gpu_memory_utilization=share)
                    ),
                )
    else:
        assert sampler.kv_cache_gib is not None  # noqa: S101  # VllmConfig checks
        for quarters in (3, 2, 1):
            size = round(sampler.kv_cache_gib * quarters / 4, 2)
            yield (
                f"sampler.kv_cache_gib = {size}",
                attrs.evolve(candidate, sampler=attrs.evolve(sampler, kv_cache_gib=size)),
            )
    if sampler.device == "cpu":
        return
    for tensor in divisors_up_to(candidate.sampler_devices, MOST_SHARED):
        is_more = tensor > sampler.tensor_parallel_size
        if is_more and sampler.data_parallel_size == 1 and model.num_attention_heads % tensor == 0:
            expert = tensor if sampler.expert_parallel_size > 1 else 1
            wider = attrs.evolve(sampler, tensor_parallel_size=tensor, expert_parallel_size=expert)
            yield (
                f"sampler.tensor_parallel_size = {tensor}",
                attrs.evolve(
                    candidate, sampler=wider, sampler_replicas=candidate.sampler_devices // tensor
                ),
            )


def _evolved(engine: EngineT, **settings: object) -> EngineT | None:
    """The same with other settings; None if its configuration refuses them together."""
    try:
        return attrs.evolve(engine, **settings)  # type: ignore[arg-type]  # the caller names them
    except ValueError:
        return None
