"""From a command line to a run: every example's `main`.

Reads the configuration, refuses what cannot run before anything starts, and shows on demand what
would run.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast

import attrs
from conduct import Job, RunSettings, conduct
from grpo import LoopConfig
from rich.console import Console
from run_folder import RunFolder

from async_policy import AsyncPolicyError
from device_env import Device, Report, detect_device, examine
from rl_contracts import ConfigError, effective_toml, load_config, settings_help
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
    description: str,
    argv: Sequence[str] | None = None,
) -> int:
    """Run an example from its command line; returns the exit status.

    0: done; 1: failed while running; 2: refused before anything started; 130: stopped by Ctrl-C.
    """
    arguments = parse(config_class, description, argv)
    machine = examine(os.environ)
    for finding in machine.findings:
        if finding.level != "note":
            say = f"{finding.level}: {finding.variable}: {finding.message}; {finding.fix}"
            print(say, file=sys.stderr)
    try:
        plan = make_plan(config_class, make_job, arguments, machine)
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.dry_run:
        print(plan.effective, end="")
    if machine.device is None or not machine.healthy:
        return 2
    # Engines and sampler of this release run on CPUs, whatever else is there.
    return 0 if arguments.dry_run else execute(plan, detect_device(force="cpu"))


def make_plan(
    config_class: type[ConfigT],
    make_job: Callable[[ConfigT], Job],
    arguments: argparse.Namespace,
    machine: Report,
) -> Plan:
    """Read the configuration and put the job together; loads and writes nothing.

    Raises:
        ConfigError: for a configuration that is refused; lists everything that is wrong.
        ValueError: for settings that do not go together, or no run to go on with.
    """
    folder = None
    if arguments.resume is not None:
        wanted = Path(arguments.resume) if arguments.resume else None
        folder = RunFolder.find(wanted, parent=RunSettings().folder)
    loaded = load_config(
        config_class,
        file=folder.config if folder else arguments.config,
        overrides=arguments.overrides,
    )
    job = make_job(loaded.value)
    return Plan(
        job=job,
        loop=loaded.value.loop,
        run=loaded.value.run,
        folder=folder,
        effective=effective_toml(loaded, derived=derived(job, machine)),
        changed=folder is None or bool(arguments.overrides),
    )


def execute(plan: Plan, device: Device) -> int:
    """Run the plan; the exit status."""
    folder = plan.folder or RunFolder.create(plan.run.folder, plan.job.name)
    if plan.changed:
        folder.config.write_text(plan.effective)
    try:
        finished = conduct(plan.job, plan.loop, plan.run, folder, device=device, console=Console())
    except (AsyncPolicyError, RolloutError) as error:
        print(f"\n{error}\n{folder.how_to_resume()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        finished = False
    if not finished:
        print(f"stopped; {folder.how_to_resume()}")
    return 0 if finished else 130


def parse(config_class: type, description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; every setting of the configuration stands in the help."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"settings, as path.to.setting=value:\n{settings_help(config_class)}",
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
    if arguments.sync:
        arguments.overrides.append("loop.max_staleness=0")
    if arguments.max_staleness is not None:
        arguments.overrides.append(f"loop.max_staleness={arguments.max_staleness}")
    return arguments


def derived(job: Job, machine: Report) -> Mapping[str, tuple[object, str]]:
    """Values that were not set but follow, for the effective configuration."""
    found = machine.device.kind if machine.device else "nothing usable"
    values: dict[str, tuple[object, str]] = {
        "device": ("cpu", f"what the examples run on; found: {found}"),
        "trainer.ranks": (job.num_ranks, "processes that train"),
    }
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
