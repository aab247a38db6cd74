"""GRPO on single-digit addition: SmolLM2-135M-Instruct learns it on two CPU cores in minutes.

    algorithm  GRPO (or the loss of DAPO or GSPO: loop.loss.kind=gspo)
    model      SmolLM2-135M-Instruct, real pretrained weights
    training   engine-fsdp over gloo, float32 master weights, bfloat16 where the CPU has it
    sampling   rollout-vllm on the CPU
    wiring     Ray; weights travel through vLLM's own weight-transfer interface

The problems are "What is a + b?" with a and b from 0 to 9. The reward is 1 if the last number of
the answer is right, halved unless the model ends by itself. Some problems are held out, so that
the reward on them means something.
"""

import functools
import os
import sys
from pathlib import Path
from typing import Literal, get_args

import attrs
import torch
from conduct import Job, Problems, RunSettings
from grpo import LoopConfig, train
from launch import main
from smollm2 import default_cache, smollm2_folder
from trainer import Engine, Scorer

from engine_fsdp import FsdpConfig, FsdpEngine, FsdpScorer, OptimConfig
from rl_tasks import AdditionConfig, addition_problems, addition_reward
from rollout_vllm import VllmConfig

ComputeDtype = Literal["bfloat16", "float32"]
"""Type of weights and activations in forward and backward."""

MAX_PROMPT_LEN = 32
"""Room for the prompt, in tokens; the problems here have 17."""


def fast_dtype() -> ComputeDtype:
    """bfloat16 where this CPU has instructions for it; elsewhere it would be emulated, and slow."""
    capabilities = torch.cpu.get_capabilities()
    names = ("avx512_bf16", "amx_bf16", "bf16")
    return "bfloat16" if any(capabilities.get(name) for name in names) else "float32"


@attrs.frozen(kw_only=True)
class QuickstartConfig:
    """Everything that a quickstart run can be told."""

    loop: LoopConfig = attrs.field(
        factory=lambda: LoopConfig(num_steps=30, max_new_tokens=16, evaluate_every=6)
    )
    """The loop."""

    optim: OptimConfig = attrs.field(
        factory=lambda: OptimConfig(learning_rate=4e-5, weight_decay=0.0)
    )
    """The optimizer. Learning rate: docs/first_run.md."""

    task: AdditionConfig = attrs.field(factory=AdditionConfig)
    """The problems."""

    run: RunSettings = attrs.field(factory=RunSettings)
    """The run folder and the machine."""

    dtype: ComputeDtype = attrs.field(
        factory=fast_dtype, validator=attrs.validators.in_(get_args(ComputeDtype))
    )
    """Of trainer and sampler. Default: bfloat16 on a CPU that has instructions for it."""

    model_path: Path | None = None
    """A Hugging Face folder to train instead of SmolLM2-135M-Instruct."""


def make_engine(device: torch.device, *, config: FsdpConfig) -> Engine:
    """One rank's engine, in its own process."""
    return FsdpEngine(config, device=device)


def make_reference(device: torch.device, *, config: FsdpConfig) -> Scorer:
    """One rank's part of the policy that the run begins with, frozen."""
    return FsdpScorer(config, device=device)


def make_job(config: QuickstartConfig) -> Job:
    """Put the run together; loads nothing."""
    model = config.model_path or default_cache()
    kind = type(config.loop.loss).kind
    model_name = model.name if config.model_path else "SmolLM2-135M-Instruct"
    engine = FsdpConfig(
        model_path=str(model),
        optim=config.optim,
        compute_dtype=config.dtype,
        temperature=config.loop.temperature,
    )
    problems = addition_problems(config.task)
    return Job(
        name="quickstart",
        title=f"{model_name} learns single-digit addition, {kind.upper()} loss",
        parallel=engine.parallel,
        make_engine=functools.partial(make_engine, config=engine),
        make_reference=functools.partial(make_reference, config=engine)
        if config.loop.has_kl_term
        else None,
        loop=train,
        engine_config=engine,
        sampler=VllmConfig(
            model=str(model),
            dtype=config.dtype,
            max_model_len=MAX_PROMPT_LEN + config.loop.max_new_tokens,
            max_num_seqs=64,
            kv_cache_gib=0.5,
            cpu_threads=len(os.sched_getaffinity(0)),
        ),
        prepare_model=lambda: config.model_path or smollm2_folder(),
        problems=functools.partial(
            Problems,
            train=problems.train,
            heldout=problems.heldout,
            rewards={problems.train[0].data_source: addition_reward()},
        ),
        try_next=(
            "examples/quickstart.py loop.loss.kind=gspo",
            "examples/quickstart.py --sync",
            "examples/grpo_trainer/run_qwen3_30b_veomni.py --size tiny",
        ),
    )


if __name__ == "__main__":
    sys.exit(main(QuickstartConfig, make_job, name="quickstart", description=__doc__))
