"""GSPO on mathematics: Qwen3-32B, 64 devices, sequences of 32 thousand tokens shared by four.

    algorithm  GSPO: one importance ratio for a sequence, clipped at 3e-4 and 4e-4
    model      Qwen3-32B
    training   engine-fsdp, 64 ranks, four of which share every sequence (Ulysses)
    sampling   rollout-vllm, 16 engines of four devices
    devices    64 accelerators of 64 GB or more that trainer and sampler take turns on

--size tiny runs the same loop to its end on two CPU cores: a Qwen3 of 200 thousand parameters that
half knows how to sort digits, two ranks that share every sequence.

Numbers without another source are those of verl's
examples/gspo_trainer/run_qwen3_32b_gspo_npu.sh. docs/recipes.md sets the two side by side.
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

from algos_gspo_dapo_grpo import GspoLoss
from engine_fsdp import FsdpConfig, OptimConfig
from parallel_state import ParallelState
from rollout_vllm import VllmConfig

NAME = "gspo-qwen3-32b-fsdp"
MODEL = "models/Qwen3-32B"
PROMPT, COMPLETION = 16 * 1024, 16 * 1024


def full() -> Recipe:
    """At full size."""
    return Recipe(
        data=PromptFiles(
            train=(Path("data/dapo-math-17k.parquet"),),
            heldout=(Path("data/aime-2024.parquet"),),
            max_prompt_tokens=PROMPT,
        ),
        loop=LoopConfig(
            num_steps=2800,  # 10 epochs of 17,917 problems, 64 of them in a step
            groups_per_step=64,  # ppo_mini_batch_size
            publish_every=4,  # train_batch_size 256: four mini-batches between two updates
            max_staleness=3,  # the last of them is three steps behind
            group_size=16,
            max_new_tokens=COMPLETION,
            max_tokens_per_micro_batch=PROMPT + COMPLETION,
            loss=GspoLoss(clip_low=3e-4, clip_high=4e-4),  # arXiv:2507.18071, section 5.1
            evaluate_every=100,
            evaluation_samples=1,  # the file has each problem 32 times
        ),
        engine=FsdpConfig(
            model_path=MODEL,
            optim=OptimConfig(learning_rate=1e-6, warmup_steps=10, weight_decay=0.1),
            activation_checkpointing="full",
            offload="parameters",
            parallel=ParallelState(dp_size=16, ulysses_size=4),
        ),
        sampler=VllmConfig(
            model=MODEL,
            device="cuda",
            max_model_len=PROMPT + COMPLETION,
            tensor_parallel_size=4,
            data_parallel_size=16,
            gpu_memory_utilization=0.9,
            max_num_batched_tokens=PROMPT + COMPLETION,
            enable_chunked_prefill=True,
            enable_sleep=True,  # free_cache_engine
        ),
        run=RunSettings(checkpoint_every=100),
    )


def slice_() -> Recipe:
    """Four layers on one device of 141 GB; see `slice_of`."""
    return slice_of(
        full(),
        MadeUpModel(name="qwen3-32b", num_layers=4),
        num_steps=8,
        groups_per_step=16,
        max_prompt_tokens=256,
        max_new_tokens=512,
        max_tokens_per_micro_batch=16384,
        kv_cache_gib=8.0,
    )


def tiny() -> Recipe:
    """On two CPU cores.

    The clip is wider: after one step of this learning rate nearly every sequence of eight tokens
    is outside of the paper's, which is made for steps of 1e-6.
    """
    model = str(model_folder("qwen3"))
    return Recipe(
        data=SortingDigits(),
        loop=LoopConfig(
            num_steps=60,
            groups_per_step=16,
            max_new_tokens=TINY_COMPLETION,
            loss=GspoLoss(clip_low=0.1, clip_high=0.1),
            evaluate_every=20,
        ),
        engine=FsdpConfig(
            model_path=model,
            optim=OptimConfig(learning_rate=3e-4, weight_decay=0.0),
            compute_dtype="float32",
            parallel=ParallelState(ulysses_size=2),
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
    job = functools.partial(make_job, name=NAME, title="Qwen3-32B, FSDP", loop=train)
    sys.exit(main(Recipe, job, name=NAME, description=__doc__, sizes=SIZES))
