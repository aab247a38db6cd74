"""One run from its first actor to its report: start, loop, evaluate, checkpoint, stop, report."""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

import attrs
import transformers
from actors import (
    MakeEngine,
    MakeReference,
    Samplers,
    Trainer,
    TrainerRank,
    start_samplers,
)
from grpo import Group, LoopConfig, Run, Task, sample_group, sampling_seed
from rich.console import Console
from run_folder import RunFolder

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
from device_env import Device, snapshot, worker_environment
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
from rl_tasks import EncodedProblem, Problem, Reward, encode_problems
from rollout_vllm import VllmConfig
from rollout_vllm.replicas import ReplicaSet
from rollout_vllm.sampler_host import SamplerHost

READY_TIMEOUT_S = 600.0
"""How long an actor may take to be ready: far above the 20 to 60 s seen on two busy cores."""

SAMPLE_BYTES = 2**20
"""Of a file of weights, at each place that is looked at."""

NUM_SHOWN = 6
"""Answers shown before and after."""


@attrs.frozen(kw_only=True)
class RunSettings:
    """Where a run lives and what it may use."""

    folder: Path = Path("runs")
    """Holds one folder per run; relative to where the command is given."""

    checkpoint_every: int = attrs.field(default=15, validator=attrs.validators.ge(1))
    """Optimizer steps between checkpoints; there is also one at the end and at Ctrl-C."""

    max_restarts: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """How often a run that loses a process of the trainer begins again at its last checkpoint by
    itself. Default: never; it ends with the process's name, and ``--resume`` goes on."""

    keep_best: bool = False
    """Keep the checkpoint with the best held-out reward beside the newest. Those written after a
    step that was evaluated count. Default: no, as it doubles what a run leaves on the disk."""

    trackers: tuple[TrackerConfig, ...] = ()
    """Where else the metrics go, such as [{kind = "tensorboard"}]. Default: to metrics.jsonl alone,
    which holds them in any case."""

    trainer_threads: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Cores that each trainer rank computes on, and a sampler whose `cpu_threads` says nothing;
    none: this process's, shared among the ranks."""


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
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    max_prompt_tokens = job.sampler.max_model_len - loop.max_new_tokens
    problems = job.problems()
    encode = functools.partial(
        encode_problems,
        tokenizer,
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
    )


def identity(job: Job, loop: LoopConfig, task: Task) -> dict[str, JsonValue]:
    """What must be the same for a run to go on as the same run."""
    return {
        "problems": digest(task.train),
        "held-out problems": digest(task.heldout),
        "loop.seed": loop.seed,
        "loop.groups_per_step": loop.groups_per_step,
        "loop.group_size": loop.group_size,
        "model": model_digest(Path(job.sampler.model)),
        "trainer ranks": job.parallel.world_size,
    }


def model_digest(folder: Path) -> str:
    """A short text that differs for another model, and for other weights of the same shapes.

    A mebibyte of each file's beginning, middle and end is looked at, so that it costs nothing.
    """
    found = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=8)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                file.seek(place)
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


def digest(problems: Sequence[EncodedProblem]) -> str:
    """A short text that differs for other problems, another order, or another chat template."""
    text = json.dumps([(p.problem.problem_id, p.prompt_ids) for p in problems])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


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
    device: Device,
    console: Console,
) -> bool:
    """Run or go on with a job; False if Ctrl-C ended it before its last step."""
    console.print(f"run folder  {folder.path}", highlight=False, markup=False, soft_wrap=True)
    cores = len(os.sched_getaffinity(0))
    threads = settings.trainer_threads or max(1, cores // job.parallel.world_size)
    environment = {
        **worker_environment(device, num_threads=threads),
        # All ranks are on this machine; gloo would else listen on the network card's address.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    weights = Path(tempfile.mkdtemp(prefix="rl-weights-", dir=shared_memory()))
    with local_cluster(
        num_cpus=job.parallel.world_size + job.num_samplers,
        environment=environment,
        keep_logs_in=folder.path / "logs",
        scratch=weights,
    ) as cluster:
        conductor = Conductor(
            job=job,
            loop=loop,
            settings=settings,
            folder=folder,
            console=console,
            task=task,
            checkpoint=folder.store.latest(),
            begin=time.monotonic(),
        )
        try:
            finished = asyncio.run(conductor.run(cluster, weights))
        except asyncio.CancelledError as error:
            raise KeyboardInterrupt from error
    report(job, folder, console, finished=finished)
    return finished


def shared_memory() -> Path:
    """A folder in memory where there is one: weights go through it."""
    shm = Path("/dev/shm")  # noqa: S108  # a private folder is made inside it
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


@dataclass(frozen=True, kw_only=True, slots=True)
class Conductor:
    """The run's parts while it is running."""

    job: Job
    loop: LoopConfig
    settings: RunSettings
    folder: RunFolder
    console: Console
    task: Task
    checkpoint: Checkpoint | None
    begin: float

    async def run(self, cluster: Cluster, weights: Path) -> bool:
        """Start the actors, run the loop, save the model; False if Ctrl-C came first."""
        with interruptible() as stop:
            scheduler = scheduler_of(self.loop, self.folder)
            trainer = start_trainer(cluster, self.job, weights)
            with self.console.status("starting vLLM, Ray and the engine ..."):
                (samplers, hosts), _ = await asyncio.gather(
                    start_samplers(cluster, self.job.sampler, count=self.job.num_samplers),
                    wait_ready(trainer.ranks, timeout_s=READY_TIMEOUT_S),
                )
            await self.record_environments(trainer, hosts)
            if self.checkpoint is not None:
                await trainer.load_checkpoint(self.checkpoint.path / "engine")
            try:
                await self.loop_with_display(scheduler, trainer, samplers, stop)
            finally:
                await samplers.close()
            if not scheduler.finished:
                return False
            await self.save_model(trainer)
            return True

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

    async def loop_with_display(
        self, scheduler: Scheduler, trainer: Trainer, sampler: ReplicaSet, stop: "Stop"
    ) -> None:
        """The loop, with its display, metrics, evaluations and checkpoints."""
        done = int(scheduler.trained_version)
        metrics_path = self.folder.path / "metrics.jsonl"
        answers = self.folder.path / "completions.json"
        evaluate = functools.partial(self.evaluate, sampler)
        earlier = time_so_far(metrics_path, done)
        lost: Counter[int] = Counter()
        begin = self.begin
        with (
            open_metrics(metrics_path, done) as writer,
            ProgressDisplay(
                num_steps=self.loop.num_steps, done_steps=done, console=self.console
            ) as display,
            await self.open_trackers(display) as trackers,
        ):

            async def record(step: int, metrics: dict[str, float]) -> None:
                written = writer.write(step, metrics)
                await asyncio.to_thread(trackers.write, written)  # which may wait for seconds
                display.update(step, metrics)

            async def finish_step(step: int, metrics: dict[str, float]) -> bool:
                for reason in sampler.losses[lost.total() :]:
                    display.say(f"a sampler is replaced, its requests are drawn again: {reason}")
                    lost[step] += 1
                metrics["workers/restarted/count"] = float(lost[step])
                metrics["time/elapsed/seconds"] = earlier + time.monotonic() - begin
                await record(step, metrics)
                last = step == self.loop.num_steps
                if step % self.settings.checkpoint_every == 0 or last or stop.requested:
                    display.stage("writing a checkpoint")
                    value = metrics.get("reward/heldout/mean")
                    await self.write_checkpoint(step, scheduler, trainer, value)
                return not stop.requested

            stop.prepare(display.say)
            if done == 0:
                display.stage("answering the held-out problems")
                before = await self.greedy_answers(sampler)
                write_completions(before, answers)
                await record(0, await evaluate())
            display.stage("sampling and training")
            await self.job.loop(
                Run(
                    config=self.loop,
                    task=self.task,
                    scheduler=scheduler,
                    trainer=trainer,
                    sampler=sampler,
                    dtype=self.job.sampler.dtype,
                    evaluate=evaluate,
                    finish_step=finish_step,
                )
            )
            after = await self.greedy_answers(sampler)
            write_completions(joined(read_completions(answers), after), answers)

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


def start_trainer(cluster: Cluster, job: Job, weights: Path) -> Trainer:
    """One actor per rank; they meet through a file."""
    meeting_point = f"file://{weights / 'ranks-meet-here'}"
    num_ranks = job.parallel.world_size
    ranks = [
        cluster.actor(f"trainer rank {rank}").start(
            TrainerRank,
            job.make_engine,
            job.make_reference,
            rank=rank,
            num_ranks=num_ranks,
            meeting_point=meeting_point,
        )
        for rank in range(num_ranks)
    ]
    return Trainer(
        ranks, weights_folder=weights / "published", ulysses_size=job.parallel.ulysses_size
    )


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


@dataclass(slots=True)
class Stop:
    """What Ctrl-C asked for."""

    requested: bool = False
    """The loop ends after its present step, with a checkpoint."""

    say: Callable[[str], None] | None = None
    """How to tell the user; None while there is no step to finish."""

    def prepare(self, say: Callable[[str], None]) -> None:
        """From now on there is a step to finish."""
        self.say = say


@contextlib.contextmanager
def interruptible() -> Iterator[Stop]:
    """Let the first Ctrl-C (or SIGTERM) finish the step, and the second end the run at once."""
    stop = Stop()
    running = asyncio.get_running_loop()
    main_task = asyncio.current_task()
    assert main_task is not None  # noqa: S101  # called from a coroutine

    def interrupted() -> None:
        if stop.say is None or stop.requested:
            main_task.cancel()
            return
        stop.requested = True
        stop.say("finishing this step, then a checkpoint; Ctrl-C again ends at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        running.add_signal_handler(number, interrupted)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            running.remove_signal_handler(number)


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
            f"longer      {folder.resume_command(f'loop.num_steps={records[-1].step * 2}')}",
            *(f"try next    ./run {command}" for command in job.try_next),
        ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
