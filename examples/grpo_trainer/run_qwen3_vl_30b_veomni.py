"""GRPO on geometry problems with figures: Qwen3-VL-30B-A3B, which sees them, through VeOmni.

    algorithm  GRPO with a KL term (k3, 0.01) against the model that the run begins with
    model      Qwen3-VL-30B-A3B-Instruct: 128 experts in a layer, 8 of them for a token, and a
               vision tower of 27 layers, which is trained too
    training   engine-veomni, 8 ranks, expert parallelism 8
    sampling   rollout-vllm, tensor parallel 4, data parallel 2
    devices    8 accelerators of 141 GB that trainer and sampler take turns on

--size tiny runs the same loop to its end on two CPU cores: a Qwen3-VL-MoE of 270 thousand
parameters that half knows the colours of squares in pictures, two ranks, expert parallelism 2.

verl's script for this model and these problems trains it through Megatron
(examples/grpo_trainer/run_qwen3_vl-30b-megatron.sh); each number below without another source is
from there. docs/recipes.md sets the two side by side.

A prompt's pictures are decoded and cut into patches once for all its completions; the sampler gets
the pixels and the trainer the patches, and both are told which tokens stand for them.
"""

import functools
import sys
from pathlib import Path

from conduct import RunSettings
from grpo import LoopConfig, Run, loss_fn, rows_of
from launch import main
from made_up import MadeUpModel
from recipe import PromptFiles, Recipe, make_job
from slices import slice_of
from tiny_models import model_folder
from vision import SQUARE_COMPLETION, SQUARE_PROMPT, ColouredSquares

from algos_gspo_dapo_grpo import GrpoLoss, KlPenalty
from engine_veomni import OptimConfig, VeomniConfig
from parallel_state import ExtraParallelSizes, ParallelState
from rollout_vllm import VllmConfig

NAME = "grpo-qwen3-vl-30b-veomni"
MODEL = "models/Qwen3-VL-30B-A3B-Instruct"


def full() -> Recipe:
    """At full size."""
    return Recipe(
        data=PromptFiles(
            train=(Path("data/geometry3k/train.parquet"),),
            heldout=(Path("data/geometry3k/test.parquet"),),
            max_prompt_tokens=1024,  # the placeholders of the figure included
        ),
        loop=LoopConfig(
            num_steps=240,  # 15 epochs of 2101 problems: 60 rounds of four optimizer steps
            groups_per_step=128,  # ppo_mini_batch_size
            publish_every=4,  # train_batch_size 512: four mini-batches between two updates
            max_staleness=3,  # the last of them is three steps behind
            group_size=5,
            max_new_tokens=2048,
            max_tokens_per_micro_batch=4096,
            loss=GrpoLoss(kl=KlPenalty(estimator="k3", coefficient=0.01)),
            evaluate_every=20,  # test_freq, in rounds
            evaluation_samples=1,
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
            max_model_len=1024 + 2048,
            tensor_parallel_size=4,
            data_parallel_size=2,
            gpu_memory_utilization=0.5,  # 0.7 there, where the trainer's weights leave the device
            images_per_prompt=1,
            enable_sleep=True,  # free_cache_engine
        ),
        run=RunSettings(checkpoint_every=80),  # save_freq, in rounds
    )


def slice_() -> Recipe:
    """Four layers and the whole vision tower on one device of 141 GB; see `slice_of`."""
    return slice_of(
        full(),
        MadeUpModel(name="qwen3-vl-30b-a3b-instruct", num_layers=4),
        num_steps=8,
        groups_per_step=16,
        max_prompt_tokens=320,
        max_new_tokens=512,
        max_tokens_per_micro_batch=8192,
        kv_cache_gib=8.0,
        picture_side=512,
    )


def tiny() -> Recipe:
    """On two CPU cores. Learning rate: docs/first_run.md."""
    model = str(model_folder("qwen3_vl_moe"))
    return Recipe(
        data=ColouredSquares(),
        loop=LoopConfig(
            num_steps=40,
            groups_per_step=12,
            max_new_tokens=SQUARE_COMPLETION,
            loss=GrpoLoss(kl=KlPenalty(estimator="k3", coefficient=0.001)),
            evaluate_every=20,
        ),
        engine=VeomniConfig(
            model_path=model,
            optim=OptimConfig(learning_rate=3e-4, weight_decay=0.0),
            compute_dtype="float32",
            parallel=ParallelState(dp_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=2)),
        ),
        sampler=VllmConfig(
            model=model,
            dtype="float32",
            max_model_len=SQUARE_PROMPT + SQUARE_COMPLETION,
            max_num_seqs=128,
            kv_cache_gib=0.25,
            cpu_threads=1,
            images_per_prompt=1,
        ),
        run=RunSettings(checkpoint_every=20),
    )


async def train(run: Run) -> None:
    """Run from the present step to the last."""
    async with run.rollouts() as rollouts:
        await rollouts.publish(run.scheduler.trained_version)
        async for batch in rollouts.batches():  # groups, sampled and rewarded in the background
            rows = rows_of(batch, run.config)  # advantages; groups without a signal are left out
            shares = run.pack(rows)  # with their pictures, each once in a micro-batch
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
    job = functools.partial(make_job, name=NAME, title="Qwen3-VL-30B-A3B, VeOmni", loop=train)
    sys.exit(main(Recipe, job, name=NAME, description=__doc__, sizes=SIZES))
