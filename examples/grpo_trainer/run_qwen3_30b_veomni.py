"""GRPO on mathematics: Qwen3-30B-A3B, its experts spread over eight devices, in both halves.

    algorithm  GRPO with a KL term (k3, 0.001) against the model that the run begins with
    model      Qwen3-30B-A3B: 128 experts in a layer, 8 of them for a token
    training   engine-veomni, 8 ranks, expert parallelism 8
    sampling   rollout-vllm, data parallel 8, expert parallelism 8
    devices    8 accelerators of 141 GB that trainer and sampler take turns on

--size tiny runs the same loop to its end on two CPU cores: a Qwen3-MoE of 448 thousand parameters
that half knows how to sort digits, two ranks, expert parallelism 2.

verl's examples/grpo_trainer/run_qwen3_30b_veomni.sh, where each number below without another
source comes from, trains with expert_parallel_size=1. docs/recipes.md sets the two side by side.

To train with engine-fsdp, which shards the experts and does not deal them out, put an `FsdpConfig`
in the place of the `VeomniConfig`.
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
from engine_veomni import OptimConfig, VeomniConfig
from parallel_state import ExtraParallelSizes, ParallelState
from rollout_vllm import VllmConfig

NAME = "grpo-qwen3-30b-veomni"
MODEL = "models/Qwen3-30B-A3B"


def full() -> Recipe:
    """At full size."""
    return Recipe(
        data=PromptFiles(
            train=(Path("data/dapo-math-17k.parquet"),),
            heldout=(Path("data/aime-2024.parquet"),),
            max_prompt_tokens=2048,
        ),
        loop=LoopConfig(
            num_steps=200,  # 100 rounds of sampling with two optimizer steps each
            groups_per_step=8,  # ppo_mini_batch_size
            publish_every=2,  # train_batch_size 16: two mini-batches between two updates
            max_staleness=1,  # the second of them is one step behind
            group_size=4,
            max_new_tokens=8192,
            max_tokens_per_micro_batch=10240,  # one sequence of full length
            loss=GrpoLoss(kl=KlPenalty(estimator="k3", coefficient=0.001)),
            evaluate_every=50,
            evaluation_samples=1,  # the file has each problem 32 times
        ),
        engine=VeomniConfig(
            model_path=MODEL,
            optim=OptimConfig(learning_rate=1e-6),
            activation_checkpointing=True,
            parallel=ParallelState(dp_size=8, extra_parallel_sizes=ExtraParallelSizes.of(ep=8)),
        ),
        sampler=VllmConfig(
            model=MODEL,
            device="cuda",
            max_model_len=2048 + 8192,
            data_parallel_size=8,
            expert_parallel_size=8,
            gpu_memory_utilization=0.5,  # 0.7 there, where the trainer's weights leave the device
            max_num_seqs=128,
            max_num_batched_tokens=1024,
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
            enable_sleep=True,  # free_cache_engine
        ),
        run=RunSettings(checkpoint_every=100),
    )


def slice_() -> Recipe:
    """Four layers on one device of 141 GB; see `slice_of`."""
    return slice_of(
        full(),
        MadeUpModel(name="qwen3-30b-a3b", num_layers=4),
        num_steps=4,
        groups_per_step=32,
        max_prompt_tokens=256,
        max_new_tokens=512,
        max_tokens_per_micro_batch=16384,
        kv_cache_gib=8.0,
    )


def tiny() -> Recipe:
    """On two CPU cores. Learning rate: docs/first_run.md; 1e-3 collapsed at once."""
    model = str(model_folder("qwen3_moe"))
    return Recipe(
        data=SortingDigits(),
        loop=LoopConfig(
            num_steps=60,
            groups_per_step=16,
            max_new_tokens=TINY_COMPLETION,
            loss=GrpoLoss(kl=KlPenalty(estimator="k3", coefficient=0.001)),
            evaluate_every=20,
        ),
        engine=VeomniConfig(
            model_path=model,
            optim=OptimConfig(learning_rate=3e-4, weight_decay=0.0),
            compute_dtype="float32",
            parallel=ParallelState(dp_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=2)),
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
    job = functools.partial(make_job, name=NAME, title="Qwen3-30B-A3B, VeOmni", loop=train)
    sys.exit(main(Recipe, job, name=NAME, description=__doc__, sizes=SIZES))
