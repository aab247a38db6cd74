"""A plan as text: at most 100 columns, GiB and seconds."""

import textwrap
from collections.abc import Sequence
from typing import Final

from plan_assess import USABLE, Assessment, Setting
from plan_device import GIB
from plan_memory import uses_plan
from plan_time import NO_TIME, Seconds, figure

from engine_fsdp import FsdpConfig
from engine_veomni import VeomniConfig

COLUMNS: Final = 100
_NAME: Final = 22
_FIGURE: Final = 15


def as_text(
    setting: Setting,
    given: Assessment,
    *,
    refusals: Sequence[tuple[str, str]],
    recommended: tuple[Assessment, str] | None,
    checked: Sequence[str],
) -> str:
    """The whole plan."""
    lines = [*_heading(setting, given), ""]
    lines += [*_memory(setting, given), ""]
    lines += [*_cache_and_update(setting, given), ""]
    lines += [*_seconds(setting, given), ""]
    if refusals:
        lines.append("refused")
        for problem, remedy in refusals:
            lines += _wrapped(f"  - {problem}", indent=4)
            lines += _wrapped(f"    do: {remedy}", indent=8)
        lines.append("")
    if recommended is None:
        lines += _named("recommended", "nothing: no layout of these devices fits")
    else:
        found, reason = recommended
        lines += _named("recommended", found.candidate.describe())
        lines += _named("  because", reason)
    lines += ["", "what was checked"]
    for line in checked:
        lines += _wrapped(f"  - {line}", indent=4)
    return "\n".join(lines)


def _wrapped(text: str, *, indent: int = _NAME) -> list[str]:
    """Lines of at most `COLUMNS`, all but the first indented."""
    return textwrap.wrap(
        text,
        COLUMNS,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _named(name: str, text: str) -> list[str]:
    """A text beside its name."""
    return _wrapped(f"{name:<{_NAME}}{text}")


def _heading(setting: Setting, given: Assessment) -> list[str]:
    model, candidate = setting.model, given.candidate
    active = f", {model.active / 1e9:.2f}B of them for a token" if model.has_experts else ""
    lines = [f"{model.name}: {model.counts.total / 1e9:.2f}B weights{active}"]
    ranks = candidate.engine.parallel.world_size
    where = (
        f"{ranks} x {setting.device.name}, trainer and sampler in turn"
        if setting.colocated
        else f"{ranks} + {candidate.sampler_devices} x {setting.device.name}"
    )
    lines += _wrapped(f"{where}: {candidate.describe()}", indent=2)
    work = setting.work
    lines += _wrapped(
        f"a step: {work.num_sequences:,} sequences of {work.prompt_tokens:,.0f} + "
        f"{work.completion_tokens:,.0f} tokens, micro-batches of "
        f"{candidate.micro_batch_tokens:,}, {work.in_flight:,} in flight",
        indent=2,
    )
    return lines


def _memory(setting: Setting, given: Assessment) -> list[str]:
    names: list[str] = []
    for phase in given.phases:
        names += [name for name in phase.parts if name not in names]
    memory = setting.device.memory_bytes
    lines = [
        f"memory of a device, GiB; of its {memory / GIB:.1f}, {USABLE:.0%} are taken to be usable",
        " " * _NAME + "".join(f"{phase.name:>{_FIGURE}}" for phase in given.phases),
    ]
    for name in names:
        values = [phase.parts.get(name, 0) for phase in given.phases]
        if any(values):
            lines.append(f"  {name:<{_NAME - 2}}" + "".join(map(_gib, values)))
    lines.append(f"  {'total':<{_NAME - 2}}" + "".join(_gib(p.total) for p in given.phases))
    left = (phase.usable - phase.total for phase in given.phases)
    lines.append(f"  {'free':<{_NAME - 2}}" + "".join(map(_gib, left)))
    host = given.trainer.inputs_on_host
    if given.parking != NO_TIME or given.trainer.weights == 0:
        host += given.trainer.host
    if host:
        pinned = f"{host / GIB:.1f} GiB of pinned memory for each device"
        lines += _named("  on the host", pinned)
    return lines


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:>{_FIGURE}.2f}" if num_bytes else f"{'-':>{_FIGURE}}"


def _cache_and_update(setting: Setting, given: Assessment) -> list[str]:
    sampler, work, update = given.sampler, setting.work, given.update
    fits = sampler.num_sequences(work.mean_tokens)
    bound = ", for want of cache" if given.sampling.is_bound_by_cache else ""
    return [
        *_named(
            "key-value cache",
            f"{sampler.cache_bytes_per_token / 1024:,.1f} KiB a token on "
            f"each device; holds {fits:,} sequences of {work.mean_tokens:,.0f} tokens; "
            f"{given.sampling.concurrent:,} run at a time in each engine{bound}",
        ),
        *_named(
            "weight update",
            f"{update.num_bytes / GIB:.2f} GiB ({update.num_bytes:,} bytes) "
            f"at {figure(update.bytes_per_s / 1e9)} GB/s",
        ),
    ]


def _seconds(setting: Setting, given: Assessment) -> list[str]:
    order = "at the same time" if setting.overlapped else "one after the other"
    passes = setting.work.logprob_passes
    more = f" (with {passes} more pass{'es' if passes > 1 else ''})" if passes else ""
    rows: list[tuple[str, Seconds]] = [
        ("sampling", given.sampling.seconds),
        (f"training{more}", given.training),
        ("weight update", given.update.seconds),
    ]
    if given.parking != NO_TIME:
        rows.append(("to the host and back", given.parking))
    rows.append((f"step ({order})", given.step))
    width = max(len(name) for name, _ in rows) + 2
    tokens = setting.work.num_sequences * setting.work.mean_tokens
    rate = f"{tokens / given.step.high:,.0f} to {tokens / given.step.low:,.0f} tokens/s"
    return [
        "seconds",
        *(f"  {name:<{width}}{seconds!s:>18}" for name, seconds in rows),
        f"  {'that is':<{width}}{rate:>18}",
    ]


def why(given: Assessment, best: Assessment) -> str:
    """One line: what a layout gains over the given one."""
    if best is given:
        return (
            f"the given layout; no other that fits is predicted to be much faster than {given.step}"
        )
    fullest = max(best.phases, key=lambda phase: phase.total)
    room = f"{fullest.total / GIB:.0f} of {fullest.usable / GIB:.0f} GiB"
    if not given.fits:
        return f"the fastest that fits ({room}): {best.step} a step"
    return f"{best.step} a step in place of {given.step}, in {room}"


def checks(given: Assessment, setting: Setting) -> tuple[str, ...]:
    """What measured runs say about figures like these."""
    engine = given.candidate.engine
    found = []
    if not setting.device.is_measured:
        found.append(
            f"nothing was measured on {setting.device.name}: published figures "
            f"({setting.device.source}), and the shares of them that an H200 reaches"
        )
    if setting.device.kind == "cpu":
        found.append("CPU: memory is counted as on a GPU, which takes more; seconds are rough")
    found.append(f"memory of the trainer: {_memory_check(given, setting)}")
    found.append(
        "memory of the sampler: weights and cache follow from the sizes; workspace "
        f"({given.sampler.workspace / GIB:.1f} GiB) is assumed, predicted, not checked"
    )
    found.append(f"training seconds: {_training_check(given, setting)}")
    found.append(
        "sampling seconds: predicted, not checked: no throughput of a sampler on a GPU is among "
        "the results"
    )
    found.append(
        "weight update: bytes as sent in two measured updates; seconds from one within a GPU, one "
        "between two GPUs, and exports of two ranks"
        + ("" if engine.parallel.world_size <= 2 else "; not checked for more")  # noqa: PLR2004
    )
    return tuple(found)


def _memory_check(given: Assessment, setting: Setting) -> str:
    engine = given.candidate.engine
    if isinstance(engine, FsdpConfig):
        return _fsdp_memory_check(engine, is_counted=uses_plan(engine, setting.model))
    if engine.compute_dtype == "float32" or not setting.model.has_experts:
        return "predicted, not checked for this kind of model and type with engine-veomni"
    several = "" if given.trainer.num_micro_batches == 1 else " and several micro-batches"
    return (
        "within 8 % of five runs of 12 layers of Qwen3-30B-A3B on two H200, one micro-batch; "
        f"not checked for more layers and ranks{several}"
    )


def _fsdp_memory_check(engine: FsdpConfig, *, is_counted: bool) -> str:
    keeps_all = engine.activation_checkpointing == "none"
    special = {
        "adapters": engine.lora,
        "frozen weights": engine.freeze,
        "Muon": engine.muon,
        "moments in 8 bits": engine.eight_bit_moments,
        "inputs of blocks on the host": engine.offload_activations,
        "parameters on the host": engine.offload != "none",
    }
    unchecked = [name for name, is_asked in special.items() if is_asked]
    if not is_counted:
        return "predicted by formula, not checked for experts and float32 with engine-fsdp"
    if unchecked:
        return f"predicted, not checked for {', '.join(unchecked)}"
    if engine.compile_blocks and keeps_all:
        return "within 2 % of runs of Qwen3-1.7B on one and two H200 (compiled)"
    if engine.compile_blocks:
        return "counted without compiling, which takes more; predicted, not checked"
    if engine.activation_checkpointing == "selective":
        return "engine_fsdp.plan; predicted, not checked for selective activation checkpointing"
    return "within 2 % of runs of Qwen3-1.7B on an H200 (engine_fsdp.plan)"


def _training_check(given: Assessment, setting: Setting) -> str:
    engine = given.candidate.engine
    more = "; not checked for more than two ranks, nor between machines"
    if isinstance(engine, VeomniConfig) and setting.model.has_experts:
        return (
            "shares of a product from runs of 12 layers of Qwen3-30B-A3B on two H200; "
            f"not checked for more layers{more}"
        )
    if setting.model.has_experts:
        return "predicted, not checked for experts with engine-fsdp"
    if isinstance(engine, FsdpConfig) and engine.compile_blocks:
        if engine.offload_activations:
            return f"predicted, not checked: copies to the host are taken to be hidden{more}"
        if engine.activation_checkpointing != "none":
            return f"predicted, not checked for activation checkpointing{more}"
        return f"from Qwen3-1.7B on one H200, within 5 % of the run on two{more}"
    return "predicted, not checked: no run without compiled blocks is among the results"
