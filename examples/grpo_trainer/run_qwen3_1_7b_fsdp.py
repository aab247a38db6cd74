"""GRPO on grade-school mathematics: Qwen3-1.7B on eight devices.

    algorithm  GRPO with a KL term (k3, 0.001) against the model that the run begins with
    model      Qwen3-1.7B
    training   engine-fsdp, 8 ranks, compiled blocks
    sampling   rollout-vllm, data parallel 8
    devices    8 accelerators of 40 GB or more that trainer and sampler take turns on

--size tiny runs the same loop to its end on two CPU cores: a Qwen3 of 200 thousand parameters that
half knows how to sort digits.

Numbers without another source are those of verl's examples/grpo_trainer/run_qwen3-1.7b.sh, whose
mini-batch of 80 does not divide its batch of 1024: here a step takes 128.
docs/recipes.md sets the two side by side.
"""

import functools
import sys
from pathlib import Path

from conduct import RunSettings
from grpo import LoopConfig, Run, loss_fn, rows_of
from launch import main
from made_up import MadeUpModel
from recipe import (
    TINY_COMPLETION,
    PromptFiles,
    Recipe,
    SortingDigits,
    make_job,
    tiny_sampler,
)
from slices import slice_of
from tiny_models import model_folder

from algos_gspo_dapo_grpo import GrpoLoss, KlPenalty
from engine_fsdp import FsdpConfig, OptimConfig
from parallel_state import ParallelState
from rollout_vllm import VllmConfig

NAME = "grpo-qwen3-1.7b-fsdp"
MODEL = "models/Qwen3-1.7B"


def full() -> Recipe:
    """At full size."""
    return Recipe(
        data=PromptFiles(
            train=(Path("data/gsm8k/train.parquet"),),
            heldout=(Path("data/gsm8k/test.parquet"),),
            max_prompt_tokens=512,
        ),
        loop=LoopConfig(
            num_steps=875,  # 15 epochs of 7,473 problems
            groups_per_step=128,
            publish_every=8,  # train_batch_size 1024: eight steps between two updates
            max_staleness=7,  # the last of them is seven steps behind
            group_size=3,
            max_new_tokens=1024,
            max_tokens_per_micro_batch=16384,  # about ten sequences, as verl's micro-batch has
            loss=GrpoLoss(kl=KlPenalty(estimator="k3", coefficient=0.001)),
            evaluate_every=40,  # test_freq 5 rounds
        ),
        engine=FsdpConfig(
            model_path=MODEL,
            optim=OptimConfig(learning_rate=1e-6),
            compile_blocks=True,  # benchmarks/results/fsdp_train.json
            parallel=ParallelState(dp_size=8),
        ),
        sampler=VllmConfig(
            model=MODEL,
            device="cuda",
            max_model_len=512 + 1024,
            data_parallel_size=8,
            gpu_memory_utilization=0.6,
            enable_sleep=True,
        ),
        run=RunSettings(checkpoint_every=100),
    )


def slice_() -> Recipe:
    """All layers on one device of 141 GB; see `slice_of`."""
    return slice_of(
        full(),
        MadeUpModel(name="qwen3-1.7b", num_layers=28),
        num_steps=16,
        groups_per_step=32,
        max_prompt_tokens=256,
        max_new_tokens=512,
        max_tokens_per_micro_batch=16384,
        kv_cache_gib=40.0,
    )


def tiny() -> Recipe:
    """On two CPU cores. Learning rate: docs/first_run.md."""
    model = str(model_folder("qwen3"))
    return Recipe(
        data=SortingDigits(),
        loop=LoopConfig(
            num_steps=60,
            groups_per_step=16,
            max_new_tokens=TINY_COMPLETION,
            loss=GrpoLoss(kl=KlPenalty(estimator="k3", coefficient=0.001)),
            evaluate_every=20,
        ),
        engine=FsdpConfig(
            model_path=model,
            optim=OptimConfig(learning_rate=3e-4, weight_decay=0.0),
            compute_dtype="float32",
        ),
        sampler=tiny_sampler(model),
        run=RunSettings(checkpoint_every=20),
    )


async def train(run: Run) -> None:
    """Run from the present step to the last."""
    async with run.rollouts() as rollouts:
        await rollouts.publish(run.scheduler.trained_version)
        async for batch in rollouts.batches():  # groups, sampled and rewarded in the background
            rows = rows_of(batch, run.config)  # advantages; groups without a signal are left out
            shares = run.pack(rows)
            if run.config.has_kl_term:
                shares = await run.trainer.with_ref_logprobs(shares)
            result = await run.trainer.train(shares, loss_fn(run.config.loss, rows))
            step = result.step.policy_version
            rollouts.trained(step)
            await run.publish(rollouts, step)
            if not await run.finish(batch, rows, result):
                return


SIZES = {"full": full, "slice": slice_, "tiny": tiny}

if __name__ == "__main__":
    job = functools.partial(make_job, name=NAME, title="Qwen3-1.7B, FSDP", loop=train)
    sys.exit(main(Recipe, job, name=NAME, description=__doc__, sizes=SIZES))
