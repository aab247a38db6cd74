"""What a run would take, before anything is loaded: memory, bytes on the wire, seconds, refusals.

    model config, engine, sampler, device
        memory of each device, phase by phase      plan_memory.py
        seconds of a step                          plan_time.py, plan_sampling.py
        the given layout, and others               plan_assess.py, plan_layout.py
    RunPlan: a table, refusals with what to do, and the layout that is recommended

Figures come from formulas whose constants were measured where they could be; the plan says which of
them a run has confirmed.
"""

import itertools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, final

import attrs
from plan_assess import Assessment, Setting, assess
from plan_device import GIB, DeviceFacts
from plan_layout import Candidate, engines, samplers, small_changes, splits
from plan_memory import EngineConfig
from plan_model import ModelFacts
from plan_optimizer import num_in_eight_bits
from plan_text import as_text, checks, why
from plan_time import Workload

from engine_veomni import VeomniConfig, read_model_config
from rollout_vllm import VllmConfig

_WORTH_A_CHANGE: Final = 0.9
"""A layout replaces a simpler one, or the given one, if it is predicted to take less than this
share of its time: predictions are no finer."""


@final
@attrs.frozen(kw_only=True)
class Refusal:
    """Why the run would fail, and what to do."""

    problem: str
    remedy: str


@final
@attrs.frozen(kw_only=True)
class Recommendation:
    """A layout and why."""

    assessment: Assessment
    reason: str


@final
@attrs.frozen(kw_only=True)
class RunPlan:
    """What a run would take; printed as a table of at most 100 columns."""

    setting: Setting
    given: Assessment

    refusals: tuple[Refusal, ...]
    """All reasons for which it would fail; empty if it should run."""

    recommended: Recommendation | None
    """The fastest layout that fits on the same devices; None if none does."""

    checked: tuple[str, ...]
    """Which figures a measured run has confirmed, and which none has."""

    @property
    def fits(self) -> bool:
        """Whether the given layout fits into memory."""
        return self.given.fits

    def __str__(self) -> str:
        """Memory, update, seconds, refusals, recommendation."""
        return as_text(
            self.setting,
            self.given,
            refusals=[(refusal.problem, refusal.remedy) for refusal in self.refusals],
            recommended=None
            if self.recommended is None
            else (self.recommended.assessment, self.recommended.reason),
            checked=self.checked,
        )


def plan_run(  # everything that a run's time and memory depend on
    *,
    engine: EngineConfig,
    sampler: VllmConfig,
    model: ModelFacts,
    device: DeviceFacts,
    colocated: bool,
    micro_batch_tokens: int,
    sequences_in_flight: int,
    mean_prompt_tokens: float,
    mean_completion_tokens: float,
    groups_per_step: int,
    group_size: int,
    sampler_replicas: int = 1,
    reference: bool = False,
    proximal: bool = False,
    overlapped: bool = False,
) -> RunPlan:
    """Plan a run; loads no weights and starts nothing.

    Args:
        engine: of the trainer, with its ranks in `parallel`.
        sampler: one of the samplers.
        model: that is trained; the folders that `engine` and `sampler` name are not read.
        device: of trainer and sampler.
        colocated: whether trainer and samplers take turns on the same devices.
        micro_batch_tokens: the most tokens of a forward pass, of the ranks that share it together.
        sequences_in_flight: sampled at the same time, over all samplers.
        mean_prompt_tokens: of a prompt.
        mean_completion_tokens: of a completion.
        groups_per_step: prompts of an optimizer step.
        group_size: completions of a prompt.
        sampler_replicas: samplers of this kind.
        reference: whether a frozen policy scores the batch (4 bytes a weight, one more pass).
        proximal: whether the policy's own logprobs are computed before the step.
        overlapped: whether the next step is sampled while this one is trained.

    Raises:
        ValueError: for lengths or numbers that make no run.
    """
    if colocated and overlapped:
        message = (
            "plan: colocated and overlapped: trainer and samplers take turns on the same devices, "
            "so they cannot work at the same time; choose one of the two"
        )
        raise ValueError(message)
    work = Workload(
        num_sequences=groups_per_step * group_size,
        prompt_tokens=mean_prompt_tokens,
        completion_tokens=mean_completion_tokens,
        max_tokens=sampler.max_model_len,
        in_flight=sequences_in_flight,
        group_size=group_size,
        logprob_passes=int(reference) + int(proximal),
        micro_batch_tokens=micro_batch_tokens,
    )
    _check_work(work, groups_per_step=groups_per_step, sampler_replicas=sampler_replicas)
    setting = Setting(
        model=model,
        device=device,
        work=work,
        colocated=colocated,
        overlapped=overlapped,
        reference=reference,
    )
    candidate = Candidate(
        engine=engine,
        sampler=sampler,
        sampler_replicas=sampler_replicas,
        micro_batch_tokens=micro_batch_tokens,
    )
    given = assess(candidate, setting)
    refusals = tuple(_refusals(given, setting))
    return RunPlan(
        setting=setting,
        given=given,
        refusals=refusals,
        recommended=_recommend(given, setting),
        checked=checks(given, setting),
    )


def _check_work(work: Workload, *, groups_per_step: int, sampler_replicas: int) -> None:
    counts = {
        "groups_per_step": groups_per_step,
        "group_size": work.group_size,
        "sequences_in_flight": work.in_flight,
        "sampler_replicas": sampler_replicas,
        "micro_batch_tokens": work.micro_batch_tokens,
        "mean_prompt_tokens": work.prompt_tokens,
        "mean_completion_tokens": work.completion_tokens,
    }
    for name, value in counts.items():
        if not 1 <= value < 2**40:  # NaN is not
            message = f"plan: {name}: expected at least 1, got {value}"
            raise ValueError(message)
    if work.mean_tokens > work.max_tokens:
        message = (
            f"plan: a prompt of {work.prompt_tokens:g} and a completion of "
            f"{work.completion_tokens:g} tokens on average are longer than the sampler's "
            f"max_model_len = {work.max_tokens}; raise it, or give the lengths that are meant"
        )
        raise ValueError(message)


def _refusals(given: Assessment, setting: Setting) -> Iterator[Refusal]:
    yield from _refused_settings(given.candidate, setting)
    if not given.fits:
        yield Refusal(problem=_what_is_missing(given), remedy=_what_would_fit(given, setting))


def _refused_settings(candidate: Candidate, setting: Setting) -> Iterator[Refusal]:
    engine, sampler, model = candidate.engine, candidate.sampler, setting.model
    try:
        engine.parallel.check_model(
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_key_value_heads,
            num_experts=model.num_experts or None,
        )
        if isinstance(engine, VeomniConfig):
            with tempfile.TemporaryDirectory() as folder:
                model.write_config(Path(folder))
                read_model_config(attrs.evolve(engine, model_path=folder))
        elif engine.eight_bit_moments:
            num_in_eight_bits(model)
    except ValueError as error:
        yield Refusal(problem=str(error), remedy="as the message says")
    if candidate.micro_batch_tokens < sampler.max_model_len:
        yield Refusal(
            problem=f"a micro-batch of {candidate.micro_batch_tokens} tokens holds no sequence of "
            f"max_model_len = {sampler.max_model_len}",
            remedy=f"at least {sampler.max_model_len} tokens in a micro-batch",
        )
    for name, degree, number, what in (
        ("tensor_parallel_size", sampler.tensor_parallel_size, model.num_attention_heads, "heads"),
        ("expert_parallel_size", sampler.expert_parallel_size, model.num_experts, "experts"),
    ):
        if degree > 1 and (number == 0 or number % degree):
            yield Refusal(
                problem=f"sampler.{name} = {degree} must divide the model's {number} {what}",
                remedy=f"sampler.{name} = 1"
                if number == 0
                else f"one of {', '.join(str(d) for d in range(1, 65) if number % d == 0)}",
            )
    longest = model.text_config.get("max_position_embeddings")
    if isinstance(longest, int) and sampler.max_model_len > longest:
        yield Refusal(
            problem=f"sampler.max_model_len = {sampler.max_model_len} is more than the model's "
            f"max_position_embeddings = {longest}",
            remedy=f"at most {longest}",
        )
    ranks = engine.parallel.world_size
    if setting.colocated and candidate.sampler_devices != ranks and setting.device.kind != "cpu":
        yield Refusal(
            problem=f"colocated, but the trainer has {ranks} devices and the samplers "
            f"{candidate.sampler_devices}",
            remedy=f"{ranks // sampler.num_devices or 1} samplers of {sampler.num_devices} devices",
        )


def _what_is_missing(given: Assessment) -> str:
    if given.missing == 0:
        return (
            f"the key-value cache is {given.shortfall / GIB:.1f} GiB too small for one sequence of "
            f"max_model_len = {given.candidate.sampler.max_model_len} tokens"
        )
    fullest = max(given.phases, key=lambda phase: phase.missing)
    return (
        f"does not fit by {fullest.missing / GIB:.1f} GiB ({fullest.name}: "
        f"{fullest.total / GIB:.1f} of {fullest.usable / GIB:.1f} usable GiB on each device)"
    )


def _what_would_fit(given: Assessment, setting: Setting) -> str:
    """The first change that is enough, of one setting or of two; else the devices it takes."""
    for name, changed in _larger_caches(given):
        if assess(changed, setting).fits:
            return name
    changes = list(small_changes(given.candidate, setting.model, colocated=setting.colocated))
    for name, changed in changes:
        if assess(changed, setting).fits:
            return name
    for name, changed in changes:
        for other, both in small_changes(changed, setting.model, colocated=setting.colocated):
            if assess(both, setting).fits:
                return f"{name} and {other}"
    best = _best(given, setting)
    if best is not None:
        return f"another layout: {best.candidate.describe()}"
    return _how_many_devices(given, setting)


def _larger_caches(given: Assessment) -> Iterator[tuple[str, Candidate]]:
    """The least cache that holds the longest sequence, if the given one does not."""
    sampler = given.candidate.sampler
    if given.shortfall == 0:
        return
    if sampler.gpu_memory_utilization is None:
        size = math.ceil(10 * (given.sampler.cache + given.shortfall) / GIB) / 10
        larger = attrs.evolve(sampler, kv_cache_gib=size)
        yield f"sampler.kv_cache_gib = {size}", attrs.evolve(given.candidate, sampler=larger)
        return
    for percent in range(5, 100, 5):
        if (share := percent / 100) > sampler.gpu_memory_utilization:
            larger = attrs.evolve(sampler, gpu_memory_utilization=share)
            name = f"sampler.gpu_memory_utilization = {share}"
            yield name, attrs.evolve(given.candidate, sampler=larger)


def _how_many_devices(given: Assessment, setting: Setting) -> str:
    trainer = given.candidate.engine.parallel.world_size
    sampler = given.candidate.sampler_devices
    for factor in (2, 4, 8, 16, 32, 64):
        found = _best(given, setting, trainer=trainer * factor, sampler=sampler * factor)
        if found is not None:
            devices = trainer * factor + (0 if setting.colocated else sampler * factor)
            return f"{devices} devices: {found.candidate.describe()}"
    return "a smaller model, shorter sequences, or devices with more memory"


def _best(
    given: Assessment, setting: Setting, *, trainer: int | None = None, sampler: int | None = None
) -> Assessment | None:
    """The fastest layout that fits, as far as predictions can tell; the given one if it is."""
    candidate = given.candidate
    trainer = trainer or candidate.engine.parallel.world_size
    sampler = sampler or candidate.sampler_devices
    best = given if given.fits and candidate.engine.parallel.world_size == trainer else None
    for train_on, sample_on in splits(trainer, sampler, colocated=setting.colocated):
        kinds = list(samplers(candidate.sampler, setting.model, devices=sample_on))
        for stage in engines(
            candidate.engine, setting.model, ranks=train_on, on_cpu=setting.device.kind == "cpu"
        ):
            is_enough = False
            for engine, kind in itertools.product(stage, kinds):
                other = attrs.evolve(
                    candidate,
                    engine=engine,
                    sampler=kind,
                    sampler_replicas=max(1, sample_on // kind.num_devices),
                )
                found = assess(other, setting)
                is_enough = is_enough or found.fits
                if found.fits and (best is None or _is_worth_it(found, best)):
                    best = found
            if is_enough:
                break
    return best


def _is_worth_it(found: Assessment, best: Assessment) -> bool:
    return found.step.middle < _WORTH_A_CHANGE * best.step.middle


def _recommend(given: Assessment, setting: Setting) -> Recommendation | None:
    best = _best(given, setting)
    if best is None:
        return None
    return Recommendation(assessment=best, reason=why(given, best))
