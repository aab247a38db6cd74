"""The quickstart's loop with experts: a tiny Qwen3-MoE over two ranks, its experts split in two.

    algorithm  GRPO (or the loss of DAPO or GSPO: loop.loss.kind=gspo)
    model      a Qwen3-MoE of 448 thousand parameters that half knows how to sort digits
    training   engine-veomni over gloo, two ranks, expert parallelism 2
    sampling   rollout-vllm on the CPU
    wiring     Ray; weights travel through vLLM's own weight-transfer interface

To train with engine-fsdp, change the one line that imports from engine_veomni, and run with
parallel.extra_parallel_sizes.ep=1: that engine shards experts, but does not deal them out.

`loop.seed` chooses the problems too, since they are made up.
"""

import functools
import sys

import attrs
import torch
from actors import Engine
from conduct import Job, RunSettings
from grpo import LoopConfig
from launch import main
from tiny_moe import model_folder, sorting_problems, tiny_moe_folder

from engine_veomni import OptimConfig, VeomniConfig as Config, VeomniEngine as ChosenEngine
from parallel_state import ExtraParallelSizes, ParallelState
from parallel_state.process_group import init_process_group
from rl_tasks import ExactMatch
from rollout_vllm import VllmConfig

NUM_HELDOUT = 40
NUM_TRAIN = 1000


@attrs.frozen(kw_only=True)
class MoeConfig:
    """Everything that a run of this example can be told."""

    loop: LoopConfig = attrs.field(
        factory=lambda: LoopConfig(
            num_steps=60, groups_per_step=16, max_new_tokens=8, evaluate_every=20
        )
    )
    """The loop."""

    optim: OptimConfig = attrs.field(
        factory=lambda: OptimConfig(learning_rate=3e-4, weight_decay=0.0)
    )
    """The optimizer. Learning rate: docs/first_run.md; 1e-3 collapsed at once."""

    parallel: ParallelState = attrs.field(
        factory=lambda: ParallelState(dp_size=2, extra_parallel_sizes=ExtraParallelSizes.of(ep=2))
    )
    """The trainer's ranks."""

    run: RunSettings = attrs.field(factory=lambda: RunSettings(checkpoint_every=20))
    """The run folder and the machine."""


def make_engine(rank: int, num_ranks: int, meeting_point: str, *, config: Config) -> Engine:
    """One rank's engine, in its own process."""
    init_process_group(rank=rank, world_size=num_ranks, init_method=meeting_point)
    return ChosenEngine(config, device=torch.device("cpu"))


def make_job(config: MoeConfig) -> Job:
    """Put the run together; loads nothing."""
    engine = Config(
        model_path=str(model_folder()),
        optim=config.optim,
        temperature=config.loop.temperature,
        compute_dtype="float32",
        parallel=config.parallel,
    )
    problems = sorting_problems(NUM_HELDOUT + NUM_TRAIN, seed=config.loop.seed)
    return Job(
        name="grpo-moe",
        title=f"sorting digits, {type(config.loop.loss).kind.upper()} loss, a tiny Qwen3-MoE",
        num_ranks=config.parallel.world_size,
        make_engine=functools.partial(make_engine, config=engine),
        engine_config=engine,
        sampler=VllmConfig(
            model=str(model_folder()),
            dtype="float32",
            max_model_len=16 + config.loop.max_new_tokens,
            max_num_seqs=128,
            kv_cache_gib=0.25,
            cpu_threads=1,
        ),
        prepare_model=tiny_moe_folder,
        train=problems[NUM_HELDOUT:],
        heldout=problems[:NUM_HELDOUT],
        rewards={"sort": ExactMatch()},
        try_next=("examples/grpo_moe.py loop.loss.kind=gspo",),
    )


if __name__ == "__main__":
    sys.exit(main(MoeConfig, make_job, name="grpo-moe", description=__doc__))
