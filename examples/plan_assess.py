"""One layout weighed: memory of each device in each phase, and seconds of a step."""

from collections.abc import Mapping
from typing import Final, final

import attrs
from plan_device import DeviceFacts
from plan_layout import Candidate
from plan_memory import (
    SLEEPING_SAMPLER_BYTES,
    SamplerMemory,
    TrainerMemory,
    can_park,
    sampler_memory,
    trainer_memory,
)
from plan_model import ModelFacts
from plan_sampling import Sampling, SamplingJob, sampling_seconds
from plan_time import (
    NO_TIME,
    Seconds,
    WeightUpdate,
    Workload,
    parking_seconds,
    training_seconds,
    update_of,
)

USABLE: Final = 0.94
"""Of a device's memory: the rest is for contexts of CUDA and NCCL, and for what torch's allocator
holds beyond what it has given out. Assumed."""

BUCKET_BYTES: Final = 2**30
"""Weights on their way; the bucket of the measured updates."""


@final
@attrs.frozen(kw_only=True)
class Phase:
    """What is on one device at a time."""

    name: str

    parts: Mapping[str, int]
    """Bytes by what takes them."""

    usable: int
    """Bytes that there are."""

    @property
    def total(self) -> int:
        """All together."""
        return sum(self.parts.values())

    @property
    def missing(self) -> int:
        """Bytes too many; 0 if it fits."""
        return max(0, self.total - self.usable)


@final
@attrs.frozen(kw_only=True)
class Setting:
    """What does not change between layouts."""

    model: ModelFacts
    device: DeviceFacts
    work: Workload
    colocated: bool
    overlapped: bool
    """Whether sampling goes on while the trainer trains."""

    reference: bool


@final
@attrs.frozen(kw_only=True)
class Assessment:
    """What a layout takes."""

    candidate: Candidate
    trainer: TrainerMemory
    sampler: SamplerMemory
    phases: tuple[Phase, ...]
    training: Seconds
    sampling: Sampling
    update: WeightUpdate
    parking: Seconds
    """Of the trainer's memory to the host and back; nothing if it stays."""

    step: Seconds

    @property
    def missing(self) -> int:
        """Bytes too many on the fullest device."""
        return max(phase.missing for phase in self.phases)

    @property
    def shortfall(self) -> int:
        """Bytes of cache that the longest sequence lacks: vLLM does not start without."""
        longest = self.candidate.sampler.max_model_len * self.sampler.cache_bytes_per_token
        return max(0, longest - self.sampler.cache)

    @property
    def fits(self) -> bool:
        """Whether everything does."""
        return self.missing == 0 and self.shortfall == 0


def assess(candidate: Candidate, setting: Setting) -> Assessment:
    """Weigh one layout."""
    engine, model, device, work = candidate.engine, setting.model, setting.device, setting.work
    work = attrs.evolve(work, micro_batch_tokens=candidate.micro_batch_tokens)
    trainer = trainer_memory(
        engine,
        model,
        # a micro-batch is no larger than what a rank has to do
        tokens=min(
            candidate.micro_batch_tokens,
            max(1, int(work.num_sequences * work.max_tokens / engine.parallel.dp_size)),
        ),
        num_micro_batches=work.micro_batches(engine.parallel.dp_size),
    )
    sampler = sampler_memory(candidate.sampler, model, memory_bytes=device.memory_bytes)
    training = training_seconds(engine, model, device, work)
    sampling = sampling_seconds(
        SamplingJob(
            sampler=candidate.sampler,
            memory=sampler,
            model=model,
            device=device,
            work=work,
            num_engines=candidate.sampler_replicas * candidate.sampler.data_parallel_size,
            waits_for_all=not setting.overlapped,
        )
    )
    num_devices = engine.parallel.world_size
    if not setting.colocated:
        num_devices += candidate.sampler_devices
    update = update_of(engine, model, device, colocated=setting.colocated, num_devices=num_devices)
    parks = setting.colocated and can_park(engine) and device.kind != "cpu"
    parking = parking_seconds(trainer, device) if parks else NO_TIME
    step = training.plus(update.seconds).plus(parking)
    # weights are published after the training step, and sampling stands still meanwhile
    step = (
        step.beside(sampling.seconds.plus(update.seconds))
        if setting.overlapped
        else step.plus(sampling.seconds)
    )
    return Assessment(
        candidate=candidate,
        trainer=trainer,
        sampler=sampler,
        phases=_phases(candidate, setting, trainer, sampler, parks=parks),
        training=training,
        sampling=sampling,
        update=update,
        parking=parking,
        step=step,
    )


def _phases(
    candidate: Candidate,
    setting: Setting,
    trainer: TrainerMemory,
    sampler: SamplerMemory,
    *,
    parks: bool,
) -> tuple[Phase, ...]:
    usable = int(USABLE * setting.device.memory_bytes)
    shards = candidate.engine.parallel.fsdp_size
    reference = {"reference": 4 * setting.model.counts.total // shards} if setting.reference else {}
    training = {**trainer.rows(), **reference}
    sampling = {
        "sampler weights": sampler.weights,
        "key-value cache": max(0, sampler.cache),
        "sampler workspace": sampler.workspace,
    }
    if setting.device.kind == "cpu":
        ranks = candidate.engine.parallel.world_size
        everything = {name: ranks * size for name, size in training.items()}
        for name, size in sampling.items():
            everything[name] = candidate.sampler_devices * size
        return (Phase(name="this machine", parts=everything, usable=usable),)
    bucket = {"weights on their way": BUCKET_BYTES}
    if not setting.colocated:
        return (
            Phase(name="trainer", parts=training, usable=usable),
            Phase(name="sampler", parts={**sampling, **bucket}, usable=usable),
        )
    sleeps = candidate.sampler.enable_sleep
    asleep = {"sampler asleep": SLEEPING_SAMPLER_BYTES} if sleeps else sampling
    resident = {"weights": trainer.weights, "moments": trainer.moments, "library": trainer.library}
    parked = {"library": trainer.library} if parks else {**resident, **reference}
    awake = {"sampler weights": sampler.weights, "sampler workspace": sampler.workspace}
    return (
        Phase(name="training", parts={**training, **asleep}, usable=usable),
        Phase(name="sampling", parts={**parked, **sampling}, usable=usable),
        Phase(
            name="weight update",
            parts={**resident, **reference, **(awake if sleeps else sampling), **bucket},
            usable=usable,
        ),
    )
