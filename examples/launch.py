"""From a command line to a run: every example's `main`.

Reads the configuration, refuses what cannot run before anything starts, and shows on demand what
would run.
"""

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast

import attrs
from conduct import Job, RunSettings, conduct, prepare, scheduler_of
from grpo import LoopConfig, Task
from identity import identity
from missing import what_is_missing
from placement import Placement, place
from rich.console import Console
from run_folder import RunFolder

from async_policy import ActorLostError, AsyncPolicyError
from device_env import Report, detect_device, examine
from parallel_state.picture import layout_picture
from rl_contracts import ConfigError, effective_toml, load_config, settings_help
from rl_metrics.trackers.config import check_trackers
from rollout_vllm import RolloutError


class RunConfig(Protocol):
    """What the configuration of every example holds."""

    @property
    def loop(self) -> LoopConfig:
        """The loop's settings."""

    @property
    def run(self) -> RunSettings:
        """The run's settings."""


ConfigT = TypeVar("ConfigT", bound=RunConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What would run."""

    job: Job
    loop: LoopConfig
    run: RunSettings
    folder: RunFolder | None
    """The run to go on with; None for a new one."""

    effective: str
    """The effective configuration."""

    changed: bool
    """Whether it differs from what the run folder holds: then it is written."""


def main(
    config_class: type[ConfigT],
    make_job: Callable[[ConfigT], Job],
    *,
    name: str,
    description: str,
    sizes: Mapping[str, Callable[[], ConfigT]] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Run an example from its command line; returns the exit status.

    0: done; 1: failed while running; 2: refused before anything started; 130: stopped by Ctrl-C.

    Args:
        config_class: its configuration.
        make_job: puts a run together, without loading anything.
        name: begins the name of its run folders.
        description: heads the help.
        sizes: configurations to begin with, by the word after ``--size``, the first by default;
            none for the class's own defaults.
        argv: the command line; None for that of this process.
    """
    arguments = parse(config_class, description, sizes, argv)
    machine = examine(os.environ)
    for finding in machine.findings:
        if finding.level != "note":
            say = f"{finding.level}: {finding.variable}: {finding.message}; {finding.fix}"
            print(say, file=sys.stderr)
    try:
        defaults = sizes[arguments.size]() if sizes and arguments.resume is None else None
        plan = make_plan(config_class, make_job, arguments, machine, name=name, defaults=defaults)
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    refusals = what_is_missing(plan.job)
    placement = None
    try:
        placement = placement_of(plan.job, machine)
    except ValueError as error:
        refusals.append(str(error))
    if arguments.dry_run:
        show(plan, placement, refusals, arguments.device if sizes else None)
        return 0
    for line in refusals:
        print(line, file=sys.stderr)
    if placement is None or refusals or not machine.healthy:
        return 2
    return execute(plan, placement)


def show(plan: Plan, placement: Placement | None, refusals: list[str], device: str | None) -> None:
    """Print what would run, and what it would take.

    Args:
        plan: what would run.
        placement: the devices of each process; None where this machine has not got them.
        refusals: why it would not run here.
        device: what to predict for; None for what the samplers are configured for.
    """
    print(plan.effective)
    print_comments("the trainer's ranks", layout_picture(plan.job.parallel).splitlines())
    if plan.job.plan is not None:
        device = device or ("cpu" if plan.job.sampler.device == "cpu" else "h200")
        try:
            planned = plan.job.plan(device)
            print_comments(f"predicted for {device}", str(planned).splitlines())
            if planned.refusals:
                refusals = [*refusals, f"what is predicted for {device}: see `refused` above"]
        except (ValueError, OSError) as error:
            print_comments(f"no prediction for {device}", [str(error)])
    if placement is not None:
        print_comments("devices", placement.lines())
    print_comments("refused on this machine", refusals or ["nothing: it would run"])


def print_comments(title: str, lines: Sequence[str]) -> None:
    """Lines under a title, as comments of the configuration that stands before them."""
    for line in (title, *lines):
        print(f"# {line}".rstrip())
    print()


def placement_of(job: Job, machine: Report) -> Placement:
    """The devices of each process of the job.

    Raises:
        ValueError: if this machine has not got them.
    """
    # A run on CPUs may be asked for on a machine that has more.
    device = detect_device(force="cpu") if job.sampler.device == "cpu" else machine.device
    if device is None:
        raise ValueError("no device is usable here; `python -m device_env doctor` says why")
    return place(
        job.sampler,
        num_ranks=job.parallel.world_size,
        num_samplers=job.num_samplers,
        device=device,
        environ=os.environ,
    )


def make_plan(
    config_class: type[ConfigT],
    make_job: Callable[[ConfigT], Job],
    arguments: argparse.Namespace,
    machine: Report,
    *,
    name: str,
    defaults: ConfigT | None,
) -> Plan:
    """Read the configuration and put the job together; loads and writes nothing.

    Raises:
        ConfigError: for a configuration that is refused; lists everything that is wrong.
        ValueError: for settings that do not go together, or no run to go on with.
    """
    folder = None
    if arguments.resume is not None:
        wanted = Path(arguments.resume) if arguments.resume else None
        folder = RunFolder.find(wanted, parent=RunSettings().folder, name=name)
        if any(override.startswith("run.folder=") for override in arguments.overrides):
            raise ValueError(f"--resume goes on in {folder.path}; leave run.folder out")
    loaded = load_config(
        config_class,
        file=folder.config if folder else arguments.config,
        overrides=arguments.overrides,
        defaults=defaults,
    )
    job = make_job(loaded.value)
    loaded.value.loop.check_lengths(job.sampler.max_model_len)
    check_keep_best(loaded.value.run, loaded.value.loop)
    try:
        check_trackers(loaded.value.run.trackers)
    except ImportError as error:
        raise ValueError(str(error)) from error
    if folder is not None:
        scheduler_of(loaded.value.loop, folder)
    return Plan(
        job=job,
        loop=loaded.value.loop,
        run=loaded.value.run,
        folder=folder,
        effective=effective_toml(loaded, derived=derived(job, machine)),
        changed=folder is None or bool(arguments.overrides),
    )


def check_keep_best(run: RunSettings, loop: LoopConfig) -> None:
    """Refuse to keep the best checkpoint where only the last one has a held-out reward.

    Raises:
        ValueError: with both intervals.
    """
    if not run.keep_best:
        return
    if run.checkpoint_every is None:
        raise ValueError(
            "run.keep_best = True keeps one of the checkpoints, and run.checkpoint_every says that "
            "there are none; give it a number of steps, or leave keep_best out"
        )
    if math.lcm(run.checkpoint_every, loop.evaluate_every) >= loop.num_steps:
        raise ValueError(
            f"run.keep_best = True, but no step before the last of {loop.num_steps} is both "
            f"evaluated (loop.evaluate_every = {loop.evaluate_every}) and kept "
            f"(run.checkpoint_every = {run.checkpoint_every}); give the two a common multiple "
            f"below {loop.num_steps}, or leave keep_best out"
        )


def execute(plan: Plan, placement: Placement) -> int:
    """Run the plan; the exit status."""
    console = Console()
    with contextlib.ExitStack() as stack:
        try:
            task = prepare(plan.job, plan.loop, console)
            folder = plan.folder or RunFolder.create(plan.run.folder, plan.job.name)
            stack.enter_context(folder.held())
            same = {"example": plan.job.name, **identity(plan.job, plan.loop, task)}
            folder.check_identity(same)
            if plan.changed:
                folder.write_config(plan.effective)
        except (ValueError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("stopped before anything ran", file=sys.stderr)
            return 130
        try:
            finished = conduct_again(plan, folder, task=task, placement=placement, console=console)
        except (AsyncPolicyError, RolloutError, OSError) as error:
            logs = folder.path / "logs"
            print(f"\n{error}\nlogs of all processes: {logs}", file=sys.stderr)
            print(folder.how_to_resume(), file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            finished = False
        if not finished:
            print(f"stopped; {folder.how_to_resume()}")
        return 0 if finished else 130


def conduct_again(
    plan: Plan, folder: RunFolder, *, task: Task, placement: Placement, console: Console
) -> bool:
    """Run the job, and again from its last checkpoint when a process is lost; see `conduct`."""
    restarts = 0
    while True:
        try:
            return conduct(
                plan.job,
                plan.loop,
                plan.run,
                folder,
                task=task,
                placement=placement,
                console=console,
            )
        except AsyncPolicyError as error:
            if restarts == plan.run.max_restarts or not is_of_lost_process(error):
                raise
            restarts += 1
            latest = folder.store.latest()
            console.print(
                f"{error}\nbeginning again at step {latest.step if latest else 0} "
                f"(restart {restarts} of {plan.run.max_restarts})",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def is_of_lost_process(error: BaseException | None) -> bool:
    """Whether it is for a process that died: a loop's task may have met it first."""
    while error is not None and not isinstance(error, ActorLostError):
        error = error.__cause__
    return error is not None


def parse(
    config_class: type[ConfigT],
    description: str,
    sizes: Mapping[str, Callable[[], ConfigT]] | None,
    argv: Sequence[str] | None,
) -> argparse.Namespace:
    """The command line; every setting of the configuration stands in the help."""
    first = next(iter(sizes)) if sizes else None
    settings = settings_help(config_class, defaults=sizes[first]() if sizes and first else None)
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"settings, as path.to.setting=value:\n{settings}",
    )
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="see below")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", type=Path, metavar="FILE", help="TOML, JSON or YAML")
    source.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="go on with a run (default: the latest) from its last checkpoint",
    )
    if sizes:
        parser.add_argument(
            "--size",
            choices=tuple(sizes),
            help=f"configuration to begin with; default: {first}",
        )
        parser.add_argument(
            "--device",
            metavar="NAME",
            help="with --dry-run: what to predict memory and time for, such as h100-80g; "
            "default: h200, or this CPU",
        )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the effective configuration and stop"
    )
    staleness = parser.add_mutually_exclusive_group()
    staleness.add_argument(
        "--sync", action="store_true", help="sample and train in turn: loop.max_staleness=0"
    )
    staleness.add_argument(
        "--max-staleness", metavar="K", help="overlap by up to K steps: loop.max_staleness=K"
    )
    arguments = parser.parse_intermixed_args(argv)
    if sizes:
        if arguments.resume is not None and arguments.size is not None:
            parser.error("--resume goes on with the run's own configuration; leave --size out")
        if arguments.device is not None and not arguments.dry_run:
            parser.error("--device is for the predictions of --dry-run; add that, or leave it out")
        arguments.size = arguments.size or first
    says_so_itself = any(o.startswith("loop.max_staleness=") for o in arguments.overrides)
    if says_so_itself and (arguments.sync or arguments.max_staleness is not None):
        parser.error("--sync and --max-staleness set loop.max_staleness; give one of them")
    if arguments.sync:
        arguments.overrides.append("loop.max_staleness=0")
    if arguments.max_staleness is not None:
        arguments.overrides.append(f"loop.max_staleness={arguments.max_staleness}")
    return arguments


def derived(job: Job, machine: Report) -> Mapping[str, tuple[object, str]]:
    """Values that were not set but follow, for the effective configuration."""
    found = machine.device.kind if machine.device else "nothing usable"
    values: dict[str, tuple[object, str]] = {
        "device": (job.sampler.device, f"what trainer and samplers compute on; found: {found}"),
        "trainer.ranks": (job.parallel.world_size, "processes that train"),
        "command": (" ".join(sys.argv), time.strftime("given %Y-%m-%d %H:%M:%S %z")),
        "python": (machine.python, "version"),
    }
    for name, version in machine.versions.items():
        values[name] = (version, "version")
    if job.engine_config is not None:
        for name, value in plain_settings(job.engine_config, "engine."):
            values[name] = (value, type(job.engine_config).__name__)
    for name, argument in job.sampler.effective_engine_args().items():
        values[f"vllm.{name}"] = (str(argument.value), argument.origin)
    return values


def plain_settings(config: attrs.AttrsInstance, prefix: str) -> Iterator[tuple[str, str]]:
    """Every value of a configuration under its dotted path, as text."""
    for field in attrs.fields(type(config)):
        value: object = getattr(config, field.name)
        if isinstance(value, Mapping) or not attrs.has(type(value)):
            yield f"{prefix}{field.name}", str(value)
        else:
            yield from plain_settings(cast("attrs.AttrsInstance", value), f"{prefix}{field.name}.")
