"""One run from its first actor to its report: start, loop, evaluate, checkpoint, stop, report."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

import attrs
import transformers
from graders import graded_here, graders
from grpo import Group, LoopConfig, Run, Task, sample_group, sampling_seed
from interrupts import Stop, interruptible
from placement import Placement
from prompts import check_images, image_encoder, text_encoder
from rich.console import Console
from run_folder import RunFolder
from samplers import Samplers, SamplersInTurn, start_samplers
from trainer import (
    READY_TIMEOUT_S,
    MakeEngine,
    MakeReference,
    Trainer,
    TrainerRank,
    start_trainer,
)
from turns import Side, Turns

from async_policy import (
    Actor,
    Checkpoint,
    Cluster,
    JsonValue,
    Scheduler,
    local_cluster,
    read_json,
    wait_ready,
    write_json,
)
from device_env import profile_for, snapshot
from parallel_state import ParallelState
from rl_contracts import SamplingParams
from rl_metrics import (
    CompletionPair,
    MetricsWriter,
    ProgressDisplay,
    TrackerConfig,
    Trackers,
    plot_run,
    print_completions,
    read_completions,
    read_metrics,
    read_run,
    write_completions,
    write_report,
)
from rl_tasks import EncodedProblem, Problem, Reward
from rollout_vllm import VllmConfig
from rollout_vllm.replicas import ReplicaSet
from rollout_vllm.sampler_host import SamplerHost

NUM_SHOWN = 6
"""Answers shown before and after."""


@attrs.frozen(kw_only=True)
class RunSettings:
    """Where a run lives and what it may use."""

    folder: Path = Path("runs")
    """Holds one folder per run; relative to where the command is given."""

    checkpoint_every: int | None = attrs.field(default=15)
    """Optimizer steps between checkpoints; there is also one at the end and at Ctrl-C. None: there
    is none at all, and a run that stops begins again at its first step."""

    max_restarts: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """How often a run that loses a process of the trainer begins again at its last checkpoint by
    itself. Default: never; it ends with the process's name, and ``--resume`` goes on."""

    keep_best: bool = False
    """Keep the checkpoint with the best held-out reward beside the newest. Those written after a
    step that was evaluated count. Default: no, as it doubles what a run leaves on the disk."""

    trackers: tuple[TrackerConfig, ...] = ()
    """Where else the metrics go, such as [{kind = "tensorboard"}]. Default: to metrics.jsonl alone,
    which holds them in any case."""

    graders: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Processes that grade the answers and do nothing else; one that dies is replaced, and what it
    had in hand is graded again. Default: none; threads of the loop's process grade."""

    trainer_threads: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Cores that each trainer rank computes on, and a sampler whose `cpu_threads` says nothing;
    none: this process's, shared among the ranks."""

    @checkpoint_every.validator
    def _at_least_one(self, _: object, every: int | None) -> None:
        if every is not None and every < 1:
            raise ValueError(
                f"run.checkpoint_every = {every}: expected a number of steps of at least 1, or "
                "none for no checkpoint"
            )

    def keeps(self, step: int, *, ends: bool) -> bool:
        """Whether there is a checkpoint of this step, with which the run may end."""
        every = self.checkpoint_every
        return every is not None and (ends or step % every == 0)


OverlongPrompts = Literal["error", "drop"]
"""What becomes of a prompt that is too long: none is ever cut."""

TrainLoop = Callable[[Run], Awaitable[None]]
"""Runs from the scheduler's present step to its last."""


class Prediction(Protocol):
    """What a run would take, as text; a `RunPlan` fits."""

    @property
    def refusals(self) -> Sequence[object]:
        """Why it would fail; empty if it should run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problems:
    """What a run learns from, and what it is measured on."""

    train: Sequence[Problem]
    """Problems to train on."""

    heldout: Sequence[Problem]
    """Problems that are never trained on."""

    rewards: Mapping[str, Reward]
    """How answers are rewarded, by the problems' data source."""

    overlong: OverlongPrompts = "error"
    """What becomes of a prompt that leaves no room for a completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """An example's choices, put together from its configuration without loading anything."""

    name: str
    """Begins the run folder's name."""

    title: str
    """Heads the report."""

    parallel: ParallelState
    """The trainer's ranks."""

    make_engine: MakeEngine
    """Makes a rank's engine in its own process."""

    make_reference: MakeReference | None = None
    """Makes a rank's part of the reference policy; none where no loss has a KL term."""

    offloaded: bool = False
    """Whether the engine keeps its weights in host memory between calls anyway."""

    loop: TrainLoop
    """What happens in a step."""

    engine_config: attrs.AttrsInstance | None = None
    """The engine's configuration, for the record; none where that of the run holds it."""

    sampler: VllmConfig
    """The configuration of each sampler."""

    num_samplers: int = 1
    """Samplers that share the requests."""

    prepare_model: Callable[[], Path]
    """Makes sure that the model to begin with is there; returns its folder."""

    problems: Callable[[], Problems]
    """Reads or makes the problems."""

    needs: Sequence[Path] = ()
    """Files that must be there before anything starts."""

    plan: Callable[[str], Prediction] | None = None
    """What the run would take of a device of this name; none where nothing says so."""

    try_next: Sequence[str]
    """Command lines that the user may want to run after this."""


def prepare(job: Job, loop: LoopConfig, console: Console) -> Task:
    """The model in its place, and the problems as token ids.

    Raises:
        ValueError: for a folder without a model, or problems that do not fit.
    """
    transformers.utils.logging.disable_progress_bar()  # the run has a display of its own
    with console.status("preparing the model ..."):
        model = job.prepare_model()
    if not (model / "config.json").is_file():
        raise ValueError(f"expected a Hugging Face folder with config.json, got {model}")
    max_prompt_tokens = job.sampler.max_model_len - loop.max_new_tokens
    problems = job.problems()
    every = (*problems.train, *problems.heldout)
    check_images(every, most=job.sampler.images_per_prompt)
    shows = any(problem.images for problem in every)
    tokenizer, encoder = image_encoder(model) if shows else text_encoder(model)
    encode = functools.partial(
        encoder,
        max_prompt_tokens=max_prompt_tokens,
        overlong=problems.overlong,
    )
    train, heldout = encode(problems.train), encode(problems.heldout)
    for name, encoded in (("training", train), ("held-out", heldout)):
        if encoded.num_overlong:
            console.print(
                f"{encoded.num_overlong} {name} problems left out: prompts of more than "
                f"{max_prompt_tokens} tokens",
                highlight=False,
            )
    return Task(
        train=train.problems,
        heldout=heldout.problems,
        rewards=problems.rewards,
        tokenizer=tokenizer,
        grade=graded_here(problems.rewards),
    )


def scheduler_of(loop: LoopConfig, folder: RunFolder) -> Scheduler:
    """Where the run stands: at its beginning, or at its checkpoint.

    Raises:
        ValueError: if the checkpoint does not go together with the settings.
    """
    schedule = loop.schedule()
    checkpoint = folder.store.latest()
    if checkpoint is None:
        return Scheduler(schedule)
    state = cast("dict[str, JsonValue]", read_json(checkpoint.path / "scheduler.json"))
    return Scheduler.from_state(state, schedule)


def conduct(
    job: Job,
    loop: LoopConfig,
    settings: RunSettings,
    folder: RunFolder,
    *,
    task: Task,
    placement: Placement,
    console: Console,
) -> bool:
    """Run or go on with a job; False if Ctrl-C ended it before its last step."""
    console.print(f"run folder  {folder.path}", highlight=False, markup=False, soft_wrap=True)
    cores = len(os.sched_getaffinity(0))
    threads = settings.trainer_threads or max(1, cores // job.parallel.world_size)
    environment = {
        **profile_for(placement.device.kind, placement.profile, num_threads=threads).as_dict(),
        # All ranks are on this machine; they would else listen on the network card's address.
        "GLOO_SOCKET_IFNAME": "lo",
        **({} if placement.device.kind == "cpu" else {"NCCL_SOCKET_IFNAME": "lo"}),
    }
    scratch = Path(tempfile.mkdtemp(prefix="rl-weights-", dir=shared_memory()))
    with local_cluster(
        num_cpus=job.parallel.world_size + job.num_samplers + settings.graders,
        environment=environment,
        keep_logs_in=folder.path / "logs",
        scratch=scratch,
    ) as cluster:
        conductor = Conductor(
            job=job,
            loop=loop,
            settings=settings,
            folder=folder,
            console=console,
            task=task,
            placement=placement,
            checkpoint=folder.store.latest(),
            begin=time.monotonic(),
        )
        try:
            finished = asyncio.run(conductor.run(cluster, scratch))
        except asyncio.CancelledError as error:
            raise KeyboardInterrupt from error
    report(job, folder, console, finished=finished)
    return finished


def shared_memory() -> Path:
    """A folder in memory where there is one: weights go through it on CPUs."""
    shm = Path("/dev/shm")  # noqa: S108  # a private folder is made inside it
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


@dataclass(kw_only=True, slots=True)
class Parts:
    """The processes of a run."""

    trainer: Trainer
    """At the scheduler's version."""

    replicas: ReplicaSet
    """The samplers."""

    turns: Turns | None
    """Whose turn it is on devices that they share; None for devices of their own."""

    graded_again: Sequence[str]
    """Why answers were; grows meanwhile."""

    _num_told: dict[str, int] = dataclasses.field(default_factory=dict)

    def take_losses(self) -> list[str]:
        """What died and what was done about it, since this was last asked."""
        news = []
        for what, reasons in (
            ("a sampler is replaced, its requests are drawn again", self.replicas.losses),
            ("a grader is replaced, its answers are graded again", self.graded_again),
        ):
            news += [f"{what}: {reason}" for reason in reasons[self._num_told.get(what, 0) :]]
            self._num_told[what] = len(reasons)
        return news


@dataclass(frozen=True, kw_only=True, slots=True)
class Conductor:
    """The run's parts while it is running."""

    job: Job
    loop: LoopConfig
    settings: RunSettings
    folder: RunFolder
    console: Console
    task: Task
    placement: Placement
    checkpoint: Checkpoint | None
    begin: float

    async def run(self, cluster: Cluster, scratch: Path) -> bool:
        """Start the actors, run the loop, save the model; False if Ctrl-C came first."""
        with interruptible() as stop:
            scheduler = scheduler_of(self.loop, self.folder)
            trainer = start_trainer(
                cluster,
                self.job.make_engine,
                self.job.make_reference,
                placement=self.placement,
                scratch=scratch,
                devices_per_sampler=self.job.sampler.num_devices,
                ulysses_size=self.job.parallel.ulysses_size,
                offloaded=self.job.offloaded,
            )
            with self.console.status("starting vLLM, Ray and the engine ..."):
                samplers_ready = functools.partial(
                    start_samplers, cluster, self.job.sampler, placement=self.placement
                )
                if self.placement.shared:  # vLLM takes what memory it finds free
                    await self.until_ready(trainer)
                    await trainer.to_host()
                    samplers, hosts = await samplers_ready()
                else:
                    (samplers, hosts), _ = await asyncio.gather(
                        samplers_ready(), self.until_ready(trainer)
                    )
            await self.record_environments(trainer, hosts)
            turns = take_turns(trainer, samplers) if self.placement.shared else None
            try:
                async with self.graded(cluster) as (graded, losses):
                    parts = Parts(
                        trainer=trainer, replicas=samplers, turns=turns, graded_again=losses
                    )
                    await graded.loop_with_display(scheduler, parts, stop)
                if scheduler.finished:
                    await self.save_model(trainer)
            finally:
                await samplers.close()
            return scheduler.finished

    @contextlib.asynccontextmanager
    async def graded(self, cluster: Cluster) -> AsyncIterator[tuple["Conductor", Sequence[str]]]:
        """The same run, graded where the settings say, and what will have been lost there."""
        count = self.settings.graders
        if count == 0:
            yield self, ()
            return
        async with graders(cluster, self.task.rewards, count=count) as pool:
            task = dataclasses.replace(self.task, grade=pool.grade)
            yield dataclasses.replace(self, task=task), pool.losses

    async def until_ready(self, trainer: Trainer) -> None:
        """Wait for the ranks, and take them to the checkpoint."""
        await wait_ready(trainer.ranks, timeout_s=READY_TIMEOUT_S)
        if self.checkpoint is not None:
            await trainer.load_checkpoint(self.checkpoint.path / "engine")

    async def save_model(self, trainer: Trainer) -> None:
        """Put the trained model into the run folder, in the place of one from before a resume."""
        model, new, previous = (
            (self.folder.path / name).absolute()
            for name in ("model", "model.new", "model.previous")
        )
        for leftover in (new, previous):
            shutil.rmtree(leftover, ignore_errors=True)  # of a run that was killed here
        await trainer.save_pretrained(new)
        if model.exists():
            model.rename(previous)
        new.rename(model)
        shutil.rmtree(previous, ignore_errors=True)

    async def record_environments(
        self, trainer: Trainer, hosts: Sequence[Actor[SamplerHost]]
    ) -> None:
        """Write down what each worker process really sees, and say where a server answers."""
        seen = {host.name: snapshot(await host.call(SamplerHost.environment)) for host in hosts}
        for host in hosts if self.job.sampler.server is not None else ():
            line = (
                f"{host.name} answers OpenAI's clients at {await host.call(SamplerHost.server_url)}"
            )
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        for index, rank in enumerate(trainer.ranks):
            seen[f"trainer rank {index}"] = await rank.call(TrainerRank.environment)
        (self.folder.path / "environments.json").write_text(json.dumps(seen, indent=1))

    async def loop_with_display(self, scheduler: Scheduler, parts: "Parts", stop: Stop) -> None:
        """The loop, with its display, metrics, evaluations and checkpoints."""
        trainer, turns = parts.trainer, parts.turns
        sampler: Samplers = parts.replicas
        if turns is not None:
            sampler = SamplersInTurn(parts.replicas, turns)
        done = int(scheduler.trained_version)
        metrics_path = self.folder.path / "metrics.jsonl"
        answers = self.folder.path / "completions.json"
        evaluate = functools.partial(self.evaluate, sampler)
        earlier = time_so_far(metrics_path, done)
        begin = self.begin
        with (
            open_metrics(metrics_path, done) as writer,
            ProgressDisplay(
                num_steps=self.loop.num_steps, done_steps=done, console=self.console
            ) as display,
            await self.open_trackers(display) as trackers,
        ):

            async def record(step: int, metrics: dict[str, float]) -> None:
                news = parts.take_losses()
                for line in news:
                    display.say(line)
                metrics["workers/restarted/count"] = float(len(news))
                metrics["time/elapsed/seconds"] = earlier + time.monotonic() - begin
                if turns is not None:
                    metrics["time/handover/seconds"] = turns.take_seconds()
                written = writer.write(step, metrics)
                await asyncio.to_thread(trackers.write, written)  # which may wait for seconds
                display.update(step, metrics)

            async def finish_step(step: int, metrics: dict[str, float]) -> bool:
                await record(step, metrics)
                if self.settings.keeps(step, ends=self.may_end(step, stop)):
                    display.stage("writing a checkpoint")
                    value = metrics.get("reward/heldout/mean")
                    await self.write_checkpoint(step, scheduler, trainer, value)
                return not stop.requested

            stop.prepare(display.say, keeps=self.settings.checkpoint_every is not None)
            if done == 0:
                display.stage("answering the held-out problems")
                before = await self.greedy_answers(sampler)
                write_completions(before, answers)
                await record(0, await evaluate())
            display.stage("sampling and training")
            run = Run(
                config=self.loop,
                task=self.task,
                scheduler=scheduler,
                trainer=trainer,
                sampler=sampler,
                dtype=self.job.sampler.dtype,
                evaluate=evaluate,
                record=record,
                finish_step=finish_step,
                evaluates_beside=functools.partial(
                    self.evaluates_beside, stop=stop, shared=turns is not None
                ),
            )
            try:
                await self.job.loop(run)
            finally:
                await run.close()
            after = await self.greedy_answers(sampler)
            write_completions(joined(read_completions(answers), after), answers)

    def may_end(self, step: int, stop: Stop) -> bool:
        """Whether this may be the run's last step."""
        return step == self.loop.num_steps or stop.requested

    def evaluates_beside(self, step: int, *, stop: Stop, shared: bool) -> bool:
        """Whether training may go on while the policy of this step is measured."""
        # a checkpoint goes with the metrics of its step, and nothing comes after the last
        if self.may_end(step, stop) or self.settings.keeps(step, ends=False):
            return False
        # where devices are shared there is no beside
        return not shared and self.loop.max_staleness > 0

    async def open_trackers(self, display: ProgressDisplay) -> Trackers:
        """The run's trackers, with what the run has recorded so far."""
        path = self.folder.path / "metrics.jsonl"
        return await asyncio.to_thread(
            Trackers.open,
            self.settings.trackers,
            folder=self.folder.path,
            say=display.say,
            records=read_metrics(path),
        )

    async def evaluate(self, sampler: Samplers) -> dict[str, float]:
        """Mean reward on the held-out problems, sampled as in training."""
        begin = time.monotonic()
        groups = await self.answer(
            sampler,
            self.task.heldout,
            num_samples=self.loop.evaluation_samples,
            temperature=self.loop.temperature,
        )
        rewards = [reward for group in groups for reward in group.rewards]
        scored = [reward for reward in rewards if math.isfinite(reward)]
        lengths = [len(c.token_ids) for group in groups for c in group.completions]
        return {
            **({"reward/heldout/mean": sum(scored) / len(scored)} if scored else {}),
            "reward/heldout_unscorable/count": float(len(rewards) - len(scored)),
            "length/heldout/mean": sum(lengths) / len(lengths),
            "time/evaluate/seconds": time.monotonic() - begin,
        }

    async def greedy_answers(self, sampler: Samplers) -> list[CompletionPair]:
        """The likeliest answers to a few held-out problems, as the `before` of pairs."""
        groups = await self.answer(
            sampler, self.task.heldout[:NUM_SHOWN], num_samples=1, temperature=0.0
        )
        return [
            CompletionPair(
                prompt=group.problem.problem.messages[-1].content,
                ground_truth=group.problem.problem.ground_truth,
                before=group.texts[0],
                after="",
                reward_before=group.rewards[0] if math.isfinite(group.rewards[0]) else None,
                reward_after=None,
            )
            for group in groups
        ]

    async def answer(
        self,
        sampler: Samplers,
        problems: Sequence[EncodedProblem],
        *,
        num_samples: int,
        temperature: float,
    ) -> list[Group]:
        """Sample and reward held-out problems; the same seeds each time."""

        def group_of(problem: EncodedProblem) -> Awaitable[Group]:
            name = problem.problem.problem_id
            params = SamplingParams(
                max_new_tokens=self.loop.max_new_tokens,
                temperature=temperature,
                seed=sampling_seed("heldout", self.loop.seed, name) if temperature > 0.0 else None,
            )
            return sample_group(
                self.task, sampler, problem, params, num_samples=num_samples, group_id=name
            )

        return await asyncio.gather(*map(group_of, problems))

    async def write_checkpoint(
        self, step: int, scheduler: Scheduler, trainer: Trainer, heldout: float | None
    ) -> None:
        """Engine and scheduler into a new folder that becomes current by one rename."""
        running = asyncio.get_running_loop()

        def fill(folder: Path) -> None:
            # In a thread of the store's; the engine saves in its own process meanwhile.
            saving = trainer.save_checkpoint((folder / "engine").absolute())
            asyncio.run_coroutine_threadsafe(saving, running).result()
            write_json(folder / "scheduler.json", scheduler.state())

        value = heldout if self.settings.keep_best else None
        await asyncio.to_thread(self.folder.store.write, step, fill, value=value)


def take_turns(trainer: Trainer, samplers: ReplicaSet) -> Turns:
    """Let them share their devices; the samplers have them now."""

    async def hand_over(side: Side) -> None:
        if side == "trainer":
            await samplers.sleep()
            await trainer.to_device()
        else:
            await trainer.to_host()
            await samplers.wake()

    turns = Turns(hand_over=hand_over, owner="sampler")
    trainer.take_turns(turns)
    return turns


def open_metrics(path: Path, done: int) -> MetricsWriter:
    """A new file, or the old one without what came after the checkpoint."""
    if done > 0:
        return MetricsWriter.resume(path, last_step=done)
    path.unlink(missing_ok=True)  # of a run that was killed before its first checkpoint
    return MetricsWriter.create(path)


def time_so_far(path: Path, done: int) -> float:
    """Seconds that the run took before it was resumed."""
    if done == 0:
        return 0.0
    seconds = [
        r.values.get("time/elapsed/seconds", 0.0) for r in read_metrics(path) if r.step <= done
    ]
    return max(seconds, default=0.0)


def joined(before: list[CompletionPair], after: list[CompletionPair]) -> list[CompletionPair]:
    """The answers of two times side by side."""
    if [pair.prompt for pair in before] != [pair.prompt for pair in after]:
        raise ValueError("expected answers to the same problems before and after")
    return [
        dataclasses.replace(first, after=second.before, reward_after=second.reward_before)
        for first, second in zip(before, after, strict=True)
    ]


def report(job: Job, folder: RunFolder, console: Console, *, finished: bool) -> None:
    """Plot and page from what is in the run folder; the end of the story on the terminal."""
    records = read_metrics(folder.path / "metrics.jsonl")
    plot_run(records, folder.path / "plot.png", title=job.title)
    write_report(read_run(folder.path, title=job.title), folder.path / "report.html")
    heldout = [
        r.values["reward/heldout/mean"] for r in records if "reward/heldout/mean" in r.values
    ]
    pairs = read_completions(folder.path / "completions.json")
    if heldout:
        learned = f"reward on held-out problems: {heldout[0]:.3f} before, {heldout[-1]:.3f} now"
    else:
        learned = "no answer to a held-out problem could be scored"
    lines = [
        "",
        learned,
        f"report      {folder.path / 'report.html'}",
    ]
    if finished:
        print_completions(pairs, console=console)
        lines += [
            f"model       {folder.path / 'model'}  (a Hugging Face folder)",
            *(
                [f"longer      {folder.resume_command(f'loop.num_steps={records[-1].step * 2}')}"]
                if folder.store.latest() is not None
                else []
            ),
            *(f"try next    ./run {command}" for command in job.try_next),
        ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
