"""DAPO on mathematics, fully asynchronous: Qwen3-30B-A3B on two sets of 16 devices.

    algorithm  DAPO: clip-higher, token mean, dynamic sampling, soft punishment of long completions
    model      Qwen3-30B-A3B: 128 experts in a layer, 8 of them for a token
    training   engine-fsdp on 16 devices, eight of which share every sequence (Ulysses)
    sampling   rollout-vllm on 16 others: eight engines of two devices, tensor and expert parallel
    timing     a batch is trained on as soon as enough groups are done, at most three steps late

--size tiny runs the same loop to its end on two CPU cores: a Qwen3-MoE of 448 thousand parameters
that half knows how to sort digits.

Numbers without another source are those of verl's
experimental/fully_async_policy/shell/dapo_30b_a3b_math_fsdp_npu.sh, which asks for expert
parallelism in the sampler twice, once without effect. docs/recipes.md sets the two side by side.
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

from algos_gspo_dapo_grpo import DapoLoss, DynamicSampling, SoftOverlong
from engine_fsdp import FsdpConfig, OptimConfig
from parallel_state import ParallelState
from rollout_vllm import VllmConfig

NAME = "dapo-qwen3-30b-a3b-fsdp-async"
MODEL = "models/Qwen3-30B-A3B"
PROMPT, COMPLETION = 2048, 6144


def full() -> Recipe:
    """At full size."""
    return Recipe(
        data=PromptFiles(
            train=(Path("data/dapo-math-17k.parquet"),),
            heldout=(Path("data/aime-2024.parquet"),),
            max_prompt_tokens=PROMPT,
        ),
        loop=LoopConfig(
            num_steps=200,  # total_rollout_steps 3200 prompts, 16 of them in a step
            groups_per_step=16,  # ppo_mini_batch_size
            publish_every=2,  # trigger_parameter_sync_step
            max_staleness=3,  # (1 + staleness_threshold 0.75) * 2 batches ahead: from_verl
            order="completion",
            group_size=4,
            max_new_tokens=COMPLETION,
            max_tokens_per_micro_batch=8 * 4096,  # ppo_max_token_len_per_gpu of eight ranks
            loss=DapoLoss(clip_low=0.2, clip_high=0.28),
            # verl's script has none, and trains on groups without a signal; the bound is that of
            # its DAPO recipes (max_num_gen_batches)
            dynamic_sampling=DynamicSampling(max_rounds=10, incomplete="yield"),
            # arXiv:2503.14476, section 4.1: the last fifth of the length
            overlong=SoftOverlong(max_length=COMPLETION, buffer=1228),
            evaluate_every=50,  # test_freq 25 rounds
            evaluation_samples=1,  # the file has each problem 32 times
        ),
        engine=FsdpConfig(
            model_path=MODEL,
            optim=OptimConfig(learning_rate=1e-6, warmup_steps=10, weight_decay=0.1),
            activation_checkpointing="full",
            parallel=ParallelState(dp_size=2, ulysses_size=8),
        ),
        sampler=VllmConfig(
            model=MODEL,
            device="cuda",
            max_model_len=PROMPT + COMPLETION,
            tensor_parallel_size=2,
            expert_parallel_size=2,
            gpu_memory_utilization=0.7,
            max_num_seqs=128,
            max_num_batched_tokens=8192,
            enable_chunked_prefill=True,
        ),
        num_samplers=8,
        run=RunSettings(checkpoint_every=100),  # save_freq 50 rounds
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
    """On two CPU cores. Learning rate: docs/first_run.md."""
    model = str(model_folder("qwen3_moe"))
    return Recipe(
        data=SortingDigits(),
        loop=LoopConfig(
            num_steps=60,
            groups_per_step=16,
            publish_every=2,
            max_staleness=3,
            order="completion",
            max_new_tokens=TINY_COMPLETION,
            loss=DapoLoss(),
            dynamic_sampling=DynamicSampling(max_rounds=10, incomplete="yield"),
            overlong=SoftOverlong(max_length=TINY_COMPLETION, buffer=1),
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
    job = functools.partial(make_job, name=NAME, title="Qwen3-30B-A3B, FSDP", loop=train)
    sys.exit(main(Recipe, job, name=NAME, description=__doc__, sizes=SIZES))
