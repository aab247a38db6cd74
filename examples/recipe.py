"""What the recipes share: one configuration for prompts, loop, engine and sampler.

The engine's and the sampler's configurations stand in it as they are, so that whatever they can do
a recipe can be told. What two of them must agree on is compared before anything starts.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, assert_never, get_args

import attrs
import torch
from conduct import Job, OverlongPrompts, Problems, RunSettings, TrainLoop
from grpo import LoopConfig
from made_up import MadeUpModel, MadeUpWords
from plan_device import find_device
from plan_memory import EngineConfig
from plan_model import ModelFacts, read_model
from run_plan import RunPlan, plan_run
from tiny_models import Architecture, model_folder, sorting_problems, tiny_model
from trainer import Engine, Scorer
from vision import ColouredSquares

from engine_fsdp import FsdpConfig, FsdpEngine, FsdpScorer
from engine_veomni import VeomniConfig, VeomniEngine, VeomniScorer
from rl_tasks import ExactMatch, LastNumber, MathAnswer, load_problems
from rollout_vllm import VllmConfig

TINY_PROMPT, TINY_COMPLETION = 16, 8
"""Longest prompt and completion of `SortingDigits`, in tokens."""


@attrs.frozen(kw_only=True)
class PromptFiles:
    """Problems from files in verl's schema: .parquet or .jsonl."""

    kind: ClassVar[str] = "files"

    train: tuple[Path, ...] = attrs.field(validator=attrs.validators.min_len(1))
    """Files to train on."""

    heldout: tuple[Path, ...] = attrs.field(validator=attrs.validators.min_len(1))
    """Files that are never trained on."""

    max_prompt_tokens: int = attrs.field(validator=attrs.validators.ge(1))
    """Longest prompt, in tokens, the chat template's part included."""

    overlong: OverlongPrompts = attrs.field(
        default="drop", validator=attrs.validators.in_(("error", "drop"))
    )
    """What becomes of a longer one: ``error`` refuses the file, ``drop`` leaves such prompts out
    and says how many. None is ever cut. Default: verl's filter_overlong_prompts."""

    reward: MathAnswer | LastNumber | ExactMatch = attrs.field(factory=MathAnswer)
    """How answers are graded, whatever data source a row names."""

    def problems(self) -> Problems:
        """Read the files."""
        read = functools.partial(load_problems, known_sources=None)
        train, heldout = read(self.train).problems, read(self.heldout).problems
        sources = {problem.data_source for problem in (*train, *heldout)}
        return Problems(
            train=train,
            heldout=heldout,
            rewards=dict.fromkeys(sources, self.reward),
            overlong=self.overlong,
        )


@attrs.frozen(kw_only=True)
class SortingDigits:
    """Problems such as "sort 5283=", for a tiny model that half knows how to."""

    kind: ClassVar[str] = "sorting"

    num_train: int = attrs.field(default=1000, validator=attrs.validators.ge(1))
    """Problems to train on."""

    num_heldout: int = attrs.field(default=40, validator=attrs.validators.ge(1))
    """Problems that are never trained on."""

    seed: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Of the problems."""

    max_prompt_tokens: int = attrs.field(default=TINY_PROMPT, validator=attrs.validators.ge(11))
    """Room for the prompt, in tokens; the longest here has 11."""

    def problems(self) -> Problems:
        """Make them up."""
        made = sorting_problems(self.num_heldout + self.num_train, seed=self.seed)
        return Problems(
            train=made[self.num_heldout :],
            heldout=made[: self.num_heldout],
            rewards={"sort": ExactMatch()},
        )


@attrs.frozen(kw_only=True)
class Recipe:
    """Everything that a run can be told."""

    data: PromptFiles | SortingDigits | ColouredSquares | MadeUpWords
    """The problems."""

    loop: LoopConfig
    """The loop."""

    engine: EngineConfig
    """What trains."""

    sampler: VllmConfig
    """What samples."""

    num_samplers: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Samplers of this kind, each in a process and on devices of its own, that share the requests.
    One that dies is replaced, and the others draw its requests again. Default: one."""

    run: RunSettings = attrs.field(factory=RunSettings)
    """The run folder and the machine."""

    def __attrs_post_init__(self) -> None:
        """Refuse parts that do not agree."""
        must_agree = (
            ("engine.model_path", self.engine.model_path, "sampler.model", self.sampler.model),
            (
                "engine.temperature",
                self.engine.temperature,
                "loop.temperature",
                self.loop.temperature,
            ),
            (
                "the engine's export_dtype",
                self.engine.resolved_export_dtype,
                "sampler.dtype",
                self.sampler.dtype,
            ),
        )
        problems = [
            f"{name} = {value!r} and {other} = {other_value!r}; set both to the same"
            for name, value, other, other_value in must_agree
            if value != other_value
        ]
        needed = self.data.max_prompt_tokens + self.loop.max_new_tokens
        if self.sampler.max_model_len != needed:
            problems.append(
                f"sampler.max_model_len = {self.sampler.max_model_len}, where data."
                f"max_prompt_tokens + loop.max_new_tokens = {self.data.max_prompt_tokens} + "
                f"{self.loop.max_new_tokens} = {needed}; set it to {needed}"
            )
        if self.sampler.hf_overrides:
            problems.append(
                f"sampler.hf_overrides = {dict(self.sampler.hf_overrides)}: the trainer would go "
                "on with what the model's config.json says; write them there instead"
            )
        problems += self._without_effect()
        if problems:
            raise ValueError("; ".join(problems))

    def _without_effect(self) -> list[str]:
        """Settings of the parts that the loop or the device leaves without effect."""
        problems = [*on_a_cpu(self.engine, self.sampler), *of_routers(self.engine, self.sampler)]
        sampler = self.sampler
        if sampler.lora is not None:
            problems.append(
                f"sampler.lora = {sampler.lora}: the trainer sends whole weights, with adapters "
                "merged into them (engine.lora); leave it at none"
            )
        if sampler.load_format != "safetensors":
            problems.append(
                f"sampler.load_format = {sampler.load_format!r}: the run is measured before its "
                "first step, which would be with random weights; set it to 'safetensors'"
            )
        if sampler.seed != 0 and sampler.server is None:
            problems.append(
                f"sampler.seed = {sampler.seed}: every request has a seed of its own, which "
                "follows from loop.seed; set that, and leave sampler.seed at 0"
            )
        if self.num_samplers > 1 and sampler.server is not None and sampler.server.port != 0:
            problems.append(
                f"sampler.server.port = {sampler.server.port} with num_samplers = "
                f"{self.num_samplers}: one port has one server, and they cannot share a port; set "
                "it to 0, and each takes a free one and says which"
            )
        return problems


def on_a_cpu(engine: EngineConfig, sampler: VllmConfig) -> Iterator[str]:
    """Settings of the engine that a CPU leaves without effect."""
    if sampler.device != "cpu":
        return
    if isinstance(engine, FsdpConfig) and engine.compile_blocks:
        yield "engine.compile_blocks = True is for GPUs; set it to False"
    if isinstance(engine, FsdpConfig) and engine.offload_activations:
        yield "engine.offload_activations = True is for GPUs; set it to False"
    if engine.offload != "none":
        yield (
            f"engine.offload = {engine.offload!r}: on a CPU weights and optimizer are in the "
            "host's memory already; set it to 'none'"
        )


def of_routers(engine: EngineConfig, sampler: VllmConfig) -> Iterator[str]:
    """Settings about a mixture's routers that this loop leaves without effect."""
    replay = engine.router_replay if isinstance(engine, VeomniConfig) else "none"
    if replay == "logprobs":
        yield (
            "engine.router_replay = 'logprobs': the loop takes the ratio against the sampler's "
            "logprobs and asks the engine for none, so there are no routes to replay; leave it at "
            "'none', or take those of the sampler: 'rollout'"
        )
    if replay == "rollout" and not sampler.return_routed_experts:
        yield (
            "engine.router_replay = 'rollout' replays what the sampler's routers chose, and "
            "sampler.return_routed_experts is False; set it to True"
        )
    if replay != "rollout" and sampler.return_routed_experts:
        yield (
            "sampler.return_routed_experts = True: nobody reads what the routers chose; leave it "
            "at False, or set engine.router_replay = 'rollout' (engine-veomni)"
        )
    if isinstance(engine, VeomniConfig) and engine.router_statistics:
        yield "engine.router_statistics = True: the loop records none of them; set it to False"


def make_job(recipe: Recipe, *, name: str, title: str, loop: TrainLoop) -> Job:
    """Put a run together; loads nothing."""
    engine = recipe.engine
    return Job(
        name=name,
        title=f"{title}, {type(recipe.loop.loss).kind.upper()} loss",
        parallel=engine.parallel,
        make_engine=functools.partial(make_engine, config=engine),
        make_reference=functools.partial(make_reference, config=engine)
        if recipe.loop.has_kl_term
        else None,
        offloaded=engine.offload != "none",
        loop=loop,
        sampler=recipe.sampler,
        num_samplers=recipe.num_samplers,
        prepare_model=functools.partial(prepare_model, Path(engine.model_path)),
        problems=recipe.data.problems,
        needs=needed_files(recipe),
        plan=functools.partial(plan_of, recipe),
        try_next=(),
    )


def tiny_sampler(model: str) -> VllmConfig:
    """For a tiny model that sorts digits, on one core."""
    return VllmConfig(
        model=model,
        dtype="float32",
        max_model_len=TINY_PROMPT + TINY_COMPLETION,
        max_num_seqs=128,
        kv_cache_gib=0.25,
        cpu_threads=1,
    )


def plan_of(recipe: Recipe, device: str) -> RunPlan:
    """What the run would take of a device; loads nothing.

    Prompts are taken to have 256 tokens and completions half of the longest, where there is room.
    """
    loop = recipe.loop
    sequences = loop.groups_per_step * loop.group_size
    shares_devices = recipe.sampler.enable_sleep
    return plan_run(
        engine=recipe.engine,
        sampler=recipe.sampler,
        model=facts_at(str(recipe.engine.model_path)),
        device=find_device(device),
        sampler_replicas=recipe.num_samplers,
        colocated=shares_devices,
        overlapped=not shares_devices and loop.max_staleness > 0,
        micro_batch_tokens=loop.max_tokens_per_micro_batch,
        sequences_in_flight=sequences * (loop.max_staleness + 1),
        mean_prompt_tokens=min(256.0, recipe.data.max_prompt_tokens / 2),
        mean_completion_tokens=loop.max_new_tokens / 2,
        groups_per_step=loop.groups_per_step,
        group_size=loop.group_size,
        reference=loop.has_kl_term,
    )


def facts_at(path: str) -> ModelFacts:
    """Sizes of a model, which need not be there if it is made up; see `read_model`."""
    made_up = MadeUpModel.at(Path(path))
    return read_model(path) if made_up is None else made_up.facts


def needed_files(recipe: Recipe) -> list[Path]:
    """What the recipe reads and does not make."""
    model = Path(recipe.engine.model_path)
    tiny = {model_folder(architecture) for architecture in get_args(Architecture)}
    is_made = model in tiny or MadeUpModel.at(model) is not None
    files = [] if is_made else [model / "config.json"]
    if isinstance(recipe.data, PromptFiles):
        files += [*recipe.data.train, *recipe.data.heldout]
    return files


def prepare_model(path: Path) -> Path:
    """The model's folder; a tiny or made-up one is made if it is not there yet."""
    made_up = MadeUpModel.at(path)
    if made_up is not None:
        return made_up.make()
    for architecture in get_args(Architecture):
        if path == model_folder(architecture):
            return tiny_model(architecture)
    return path


def make_engine(device: torch.device, *, config: EngineConfig) -> Engine:
    """One rank's engine, in its own process."""
    match config:
        case FsdpConfig():
            return FsdpEngine(config, device=device)
        case VeomniConfig():
            return VeomniEngine(config, device=device)
        case _:
            assert_never(config)


def make_reference(device: torch.device, *, config: EngineConfig) -> Scorer:
    """One rank's part of the policy that the run begins with, frozen."""
    match config:
        case FsdpConfig():
            return FsdpScorer(config, device=device)
        case VeomniConfig():
            return VeomniScorer(config, device=device)
        case _:
            assert_never(config)
