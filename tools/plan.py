r"""Plan a run before it is started: memory, weight updates, seconds, refusals, a better layout.

    ./run tools/plan.py --model Qwen/Qwen3-8B --engine fsdp --device h200 --devices 8
    ./run tools/plan.py --model path/to/folder --engine veomni --device h200 --devices 8 \
        --sampler-devices 8 engine.parallel.extra_parallel_sizes.ep=8 work.micro_batch_tokens=32768

Nothing is loaded: the sizes come from config.json, or from the published models that this
repository knows. Without `--sampler-devices` trainer and samplers take turns on the same devices.
Exit status: 0 if the run is not refused, 1 if it is, 2 for arguments that make no run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from plan_device import DEVICES, find_device
from plan_model import published_models, read_model
from run_plan import RunPlan, plan_run

from engine_fsdp import FsdpConfig
from engine_veomni import VeomniConfig
from rl_contracts import load_config, settings_help
from rl_contracts.config import parse_override
from rollout_vllm import VllmConfig

_at_least_one = attrs.validators.ge(1)


@attrs.frozen(kw_only=True)
class Work:
    """What a step samples and trains on."""

    groups_per_step: int = attrs.field(default=64, validator=_at_least_one)
    """Prompts of an optimizer step."""

    group_size: int = attrs.field(default=8, validator=_at_least_one)
    """Completions of a prompt."""

    mean_prompt_tokens: float = attrs.field(default=256.0, validator=attrs.validators.ge(1.0))
    """Of a prompt. Default: a mathematical problem with its chat template."""

    mean_completion_tokens: float = attrs.field(default=2048.0, validator=attrs.validators.ge(1.0))
    """Of a completion."""

    micro_batch_tokens: int = attrs.field(default=16384, validator=_at_least_one)
    """The most tokens of a forward pass."""

    sequences_in_flight: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_at_least_one)
    )
    """Sampled at the same time; None: all of a step."""

    reference: bool = False
    """A frozen policy scores the batch."""

    proximal: bool = False
    """The policy's own logprobs are computed before the step."""

    overlapped: bool = False
    """The next step is sampled while this one is trained; with `--sampler-devices` alone."""


@attrs.frozen(kw_only=True)
class Planned:
    """All of a run that its plan depends on."""

    engine: FsdpConfig | VeomniConfig
    """The trainer."""

    sampler: VllmConfig
    """One of the samplers."""

    work: Work = attrs.field(factory=Work)
    """The load."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"settings, as path.to.setting=value:\n{settings_help(Planned)}",
    )
    known = ", ".join(published_models())
    parser.add_argument("--model", required=True, help=f"a folder with config.json, or {known}")
    parser.add_argument("--engine", required=True, choices=["fsdp", "veomni"])
    parser.add_argument("--device", default="h200", choices=[*DEVICES, "cpu"])
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="of the trainer")
    parser.add_argument(
        "--sampler-devices", type=int, metavar="N", help="beside the trainer's; default: the same"
    )
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="see below")
    arguments = parser.parse_intermixed_args(argv)
    try:
        plan = make_plan(arguments)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(plan)
    return 1 if plan.refusals else 0


def make_plan(arguments: argparse.Namespace) -> RunPlan:
    """The plan of a command line.

    Raises:
        FileNotFoundError: for a model that is not there.
        ValueError: for settings that are refused, or numbers that make no run.
    """
    for name in ("devices", "sampler_devices"):
        if (number := getattr(arguments, name)) is not None and number < 1:
            option = f"--{name.replace('_', '-')}"
            message = f"{option}: expected a whole number of at least 1, got {number}"
            raise ValueError(message)
    model = read_model(arguments.model)
    device = find_device(arguments.device)
    given = dict(map(parse_override, arguments.overrides))
    shared = given.get("engine.parallel.ulysses_size", 1)
    samplers = arguments.sampler_devices or arguments.devices
    defaults = {
        "engine.kind": f'"{arguments.engine}"',
        "engine.model_path": f'"{model.name}"',
        "engine.optim.learning_rate": "1e-6",
        "sampler.model": f'"{model.name}"',
        "sampler.max_model_len": "4096",
        "sampler.device": '"cpu"' if device.kind == "cpu" else '"cuda"',
    }
    if isinstance(shared, int) and shared > 0:
        defaults["engine.parallel.dp_size"] = str(max(1, arguments.devices // shared))
    if device.kind == "cpu":
        defaults["sampler.kv_cache_gib"] = "1.0"
    elif "sampler.kv_cache_gib" not in given:
        defaults["sampler.gpu_memory_utilization"] = "0.8"
    if arguments.sampler_devices is None and device.kind != "cpu":
        defaults["sampler.enable_sleep"] = "true"
    planned = load_config(
        Planned,
        overrides=[
            *(f"{name}={value}" for name, value in defaults.items() if name not in given),
            *arguments.overrides,
        ],
    ).value
    if (ranks := planned.engine.parallel.world_size) != arguments.devices:
        message = (
            f"--devices: {arguments.devices}, but engine.parallel makes {ranks} ranks; set "
            "--devices or engine.parallel so that they agree"
        )
        raise ValueError(message)
    if samplers % (size := planned.sampler.num_devices):
        message = (
            f"{samplers} devices for samplers of {size} devices each: expected a multiple of "
            f"{size}; set --sampler-devices or the sampler's parallel sizes"
        )
        raise ValueError(message)
    return plan_run(
        engine=planned.engine,
        sampler=planned.sampler,
        model=model,
        device=device,
        colocated=arguments.sampler_devices is None,
        micro_batch_tokens=planned.work.micro_batch_tokens,
        sequences_in_flight=planned.work.sequences_in_flight
        or planned.work.groups_per_step * planned.work.group_size,
        mean_prompt_tokens=planned.work.mean_prompt_tokens,
        mean_completion_tokens=planned.work.mean_completion_tokens,
        groups_per_step=planned.work.groups_per_step,
        group_size=planned.work.group_size,
        sampler_replicas=samplers // size,
        reference=planned.work.reference,
        proximal=planned.work.proximal,
        overlapped=planned.work.overlapped,
    )


if __name__ == "__main__":
    sys.exit(main())
