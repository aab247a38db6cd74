"""What of verl reads a setting, and what does not: the facts behind the labels.

Each fact was found by looking for the readers of a key in `verl/**/*.py` of the published wheels
0.7.1 to 0.9.1, where nothing else is said (the wheel of 0.7.1 has no code of the fully asynchronous
program, so that facts about it begin at 0.8.0). The labels of four launch scripts were found in the
same way at verl commit 1dda039b9c6311889a9c9a26040677e1254814f9 (22 August 2026).
"""

import fnmatch
from collections.abc import Callable, Iterator
from typing import final

import attrs

from verl_conversion.composed import Composed
from verl_conversion.labels import Label
from verl_conversion.releases import RELEASES, Release
from verl_conversion.situations import (
    REF,
    A,
    M,
    R,
    both_clips,
    bypasses,
    compiles,
    cut_not_refused,
    experts_do_not_fit,
    has_critic,
    has_engine_workers,
    has_overlong_penalty,
    has_reference,
    is_dynamic,
    looks_textual,
    penalty_covers_all,
    steps_of_verl,
    strategies_differ,
)

_SINCE_0_8: tuple[Release, ...] = ("0.8.0", "0.9.0", "0.9.1")
OVERLONG = "*reward_kwargs.overlong_buffer_cfg."
"""Below either of the two paths that the reward manager's settings may stand at."""

_GPT2 = ("embd_pdrop", "resid_pdrop", "attn_pdrop")


@final
@attrs.frozen(kw_only=True)
class Fact:
    """One thing that is known about the readers of some settings."""

    keys: tuple[str, ...]
    """Paths; ``*`` stands for anything."""

    labels: tuple[Label, ...]
    """What follows."""

    why: str | Callable[[Composed], str]
    """In words; a function where the values say more."""

    evidence: str
    """Where in verl, and public issues."""

    when: Callable[[Composed], bool] = lambda _: True
    """Whether it holds in this configuration."""

    releases: tuple[Release, ...] = RELEASES
    """Where it was looked up."""

    final: bool = False
    """Whether the setting has no effect at all, so that nothing of it is carried over."""

    def why_here(self, composed: Composed) -> str:
        """The reason in this configuration."""
        return self.why if isinstance(self.why, str) else self.why(composed)

    def is_about(self, key: str, composed: Composed) -> bool:
        """Whether it says something about a key here."""
        return (
            composed.release in self.releases
            and any(fnmatch.fnmatchcase(key, pattern) for pattern in self.keys)
            and self.when(composed)
        )


def facts_about(key: str, composed: Composed) -> Iterator[Fact]:
    """What is known about a setting in this configuration."""
    return (fact for fact in FACTS if fact.is_about(key, composed))


FACTS: tuple[Fact, ...] = (
    # -- trainer ------------------------------------------------------------------------------
    Fact(
        keys=("trainer.use_legacy_worker_impl",),
        labels=("stale", "inert"),
        why="the older workers are gone, and nothing reads the switch any more",
        evidence="no reader in verl/**/*.py from 0.8.0 on; 0.7.1 read it in main_ppo.py",
        releases=_SINCE_0_8,
        final=True,
    ),
    Fact(
        keys=("trainer.default_local_dir",),
        labels=("trap",),
        why="it is empty, so checkpoints land in the working directory: a variable of the script "
        "was not set on this way through it",
        evidence="hydra reads KEY= as the empty text",
        when=lambda c: c.get("trainer.default_local_dir") == "",
    ),
    Fact(
        keys=("trainer.critic_warmup", "critic.*"),
        labels=("inert",),
        why="there is no critic: algorithm.adv_estimator is not gae",
        evidence="trainer/ppo/utils.py, need_critic",
        when=lambda c: not has_critic(c),
        final=True,
    ),
    Fact(
        keys=("trainer.total_training_steps",),
        labels=("inert",),
        why=lambda c: (
            "a fully asynchronous run stops by rollout.total_rollout_steps, of which "
            f"follow {steps_of_verl(c)} steps of verl's"
        ),
        evidence="experimental/fully_async_policy/fully_async_rollouter.py, total_train_steps",
        when=lambda c: c.is_async,
        releases=_SINCE_0_8,
        final=True,
    ),
    Fact(
        keys=("trainer.device",),
        labels=("overwritten",),
        why="corrected to the device that is there, whatever it says",
        evidence="utils/device.py, auto_set_device",
    ),
    # -- data ---------------------------------------------------------------------------------
    Fact(
        keys=("data.truncation", "data.return_raw_chat"),
        labels=("inert",),
        why="the data set stores it, and nothing reads it",
        evidence="utils/dataset/rl_dataset.py, RLHFDataset.__init__",
        final=True,
    ),
    Fact(
        keys=("data.return_raw_input_ids", "data.return_full_prompt"),
        labels=("inert",),
        why="nothing reads it",
        evidence="no reader in verl/**/*.py",
        releases=("0.9.1",),
        final=True,
    ),
    Fact(
        keys=("data.truncation",),
        labels=("trap",),
        why="a longer text prompt is cut on the left with a warning, not refused",
        evidence="experimental/agent_loop/agent_loop.py, 'left-truncating'",
        when=cut_not_refused,
        releases=_SINCE_0_8,
    ),
    # -- reference and KL ---------------------------------------------------------------------
    Fact(
        keys=(f"{REF}*",),
        labels=("inert",),
        why="there is no reference policy: both KL switches are off",
        evidence="trainer/ppo/utils.py, need_reference_policy",
        when=lambda c: not has_reference(c),
        final=True,
    ),
    Fact(
        keys=("algorithm.kl_ctrl.*", "algorithm.kl_penalty"),
        labels=("inert",),
        why="read under algorithm.use_kl_in_reward, which is off",
        evidence="trainer/ppo/ray_trainer.py and v1/trainer_base.py",
        when=lambda c: not c.on("algorithm.use_kl_in_reward"),
        final=True,
    ),
    Fact(
        keys=(f"{A}kl_loss_coef", f"{A}kl_loss_type"),
        labels=("inert",),
        why="read under actor.use_kl_loss, which is off",
        evidence="workers/utils/losses.py, ppo_loss",
        when=lambda c: not c.on(f"{A}use_kl_loss"),
        final=True,
    ),
    # -- actor --------------------------------------------------------------------------------
    Fact(
        keys=("actor_rollout_ref.nccl_timeout",),
        labels=("inert",),
        why="nothing reads it: the workers start their process group without a time limit of "
        "their own",
        evidence="workers/engine_workers.py, timeout_second=None; verl#7815, verl#7820",
        when=has_engine_workers,
        final=True,
    ),
    Fact(
        keys=(f"{A}grad_clip",),
        labels=("inert", "renamed"),
        why="the engines read actor.optim.clip_grad",
        evidence="workers/config/actor.py has the field, workers/engine/*/ read "
        "optimizer_config.clip_grad; verl#7923",
        when=has_engine_workers,
        final=True,
    ),
    Fact(
        keys=(f"{A}use_torch_compile", f"{REF}use_torch_compile"),
        labels=("inert", "renamed"),
        why="the engine reads the switch of the same name in fsdp_config or veomni",
        evidence="workers/engine/*/transformer_impl.py, engine_config.use_torch_compile",
        when=has_engine_workers,
        final=True,
    ),
    Fact(
        keys=(f"{A}use_torch_compile", f"{REF}use_torch_compile"),
        labels=("trap",),
        why="fsdp_config.use_torch_compile stays on: compilation is not off",
        evidence="workers/engine/fsdp/transformer_impl.py",
        when=lambda c: has_engine_workers(c) and compiles(c),
    ),
    Fact(
        keys=(f"{A}fsdp_config.strategy", f"{REF}fsdp_config.strategy"),
        labels=("overwritten",),
        why="replaced by actor.strategy",
        evidence="workers/config/actor.py, FSDPActorConfig.__post_init__",
        releases=_SINCE_0_8,
        final=True,
    ),
    Fact(
        keys=(f"{A}fsdp_config.strategy",),
        labels=("trap",),
        why=lambda c: f"what runs is actor.strategy={c.get(f'{A}strategy')}",
        evidence="verl#7540, verl#7597, since verl#5885; verl-omni#216",
        when=strategies_differ,
        releases=_SINCE_0_8,
    ),
    Fact(
        keys=(f"{A}ulysses_sequence_parallel_size",),
        labels=("renamed",),
        why="now actor.fsdp_config.ulysses_sequence_parallel_size; the old name is still handed on "
        "when above 1, so a 1 cannot undo a nested value",
        evidence="workers/config/actor.py, FSDPActorConfig.__post_init__",
        when=lambda c: (c.count(f"{A}ulysses_sequence_parallel_size") or 1) > 1,
    ),
    Fact(
        keys=(f"{A}ppo_max_token_len_per_gpu",),
        labels=("inert",),
        why="read only with use_dynamic_bsz, which is off",
        evidence="workers/engine/utils.py, prepare_micro_batches",
        when=lambda c: not is_dynamic(c),
        final=True,
    ),
    Fact(
        keys=(f"{REF}log_prob_max_token_len_per_gpu",),
        labels=("inert",),
        why="read only with log_prob_use_dynamic_bsz, which is off",
        evidence="workers/engine/utils.py, prepare_micro_batches",
        when=lambda c: has_reference(c) and not is_dynamic(c, f"{REF}log_prob_use_dynamic_bsz"),
        final=True,
    ),
    Fact(
        keys=(f"{R}log_prob_max_token_len_per_gpu",),
        labels=("inert",),
        why="read only with log_prob_use_dynamic_bsz, which is off",
        evidence="workers/engine/utils.py, prepare_micro_batches",
        when=lambda c: not is_dynamic(c, f"{R}log_prob_use_dynamic_bsz"),
        final=True,
    ),
    Fact(
        keys=(f"{A}ppo_micro_batch_size", f"{A}ppo_micro_batch_size_per_gpu"),
        labels=("inert",),
        why="micro-batches are cut by tokens: use_dynamic_bsz is on",
        evidence="workers/engine/utils.py, prepare_micro_batches",
        when=is_dynamic,
        final=True,
    ),
    Fact(
        keys=(f"{R}log_prob_*",),
        labels=("inert",),
        why="old logprobs are not computed again: algorithm.rollout_correction.bypass_mode "
        "composes to True (the worker compares log_prob_use_dynamic_bsz with the actor's, no more)",
        evidence="experimental/fully_async_policy/config, trainer/ppo/rollout_corr_helper.py",
        when=bypasses,
        releases=_SINCE_0_8,
        final=True,
    ),
    Fact(
        keys=(f"{A}clip_ratio",),
        labels=("inert", "renamed", "trap"),
        why="clip_ratio_low and clip_ratio_high, both set by default, take its place",
        evidence="trainer/ppo/core_algos.py, compute_policy_loss_vanilla",
        when=both_clips,
        final=True,
    ),
    Fact(
        keys=(f"{A}optim.lr_warmup_steps",),
        labels=("inert", "renamed"),
        why="VeOmni's schedule is made with actor.optim.lr_warmup_steps_ratio",
        evidence="workers/engine/veomni/transformer_impl.py, _build_lr_scheduler",
        when=lambda c: c.engine == "veomni",
        final=True,
    ),
    Fact(
        keys=tuple(f"{M}override_config.{name}" for name in _GPT2),
        labels=("inert",),
        why="a name of GPT-2's configuration; a model of another kind has no such dropout",
        evidence="set on the Hugging Face config and read by transformers' GPT-2 alone",
        when=lambda c: "gpt2" not in str(c.get(f"{M}path", "")).lower(),
        final=True,
    ),
    Fact(
        keys=(f"{M}path",),
        labels=("stale",),
        why="a folder of merged experts: VeOmni stacks experts when it loads, and engine-veomni "
        "reads the model as published",
        evidence="VeOmni#696",
        when=lambda c: c.engine == "veomni" and str(c.get(f"{M}path", "")).endswith("merge"),
    ),
    # -- rollout ------------------------------------------------------------------------------
    Fact(
        keys=(f"{R}engine_kwargs.vllm.enable_expert_parallel",),
        labels=("overwritten",),
        why="set afterwards from expert_parallel_size > 1",
        evidence="workers/rollout/vllm_rollout/vllm_async_server.py; verl#6066",
        final=True,
    ),
    Fact(
        keys=(f"{R}engine_kwargs.vllm.mm_processor_cache_gb",),
        labels=("inert",),
        why="a cache of images and sounds, of which a text model has none (by the model's name)",
        evidence="passed through to vLLM",
        when=looks_textual,
        final=True,
    ),
    Fact(
        keys=(f"{R}expert_parallel_size",),
        labels=("broken",),
        why="must be tensor_model_parallel_size x data_parallel_size; verl stops at its start",
        evidence="workers/config/rollout.py, RolloutConfig.__post_init__",
        when=experts_do_not_fit,
    ),
    Fact(
        keys=(f"{R}mode",),
        labels=("broken",),
        why="'sync' was removed; verl stops at its start",
        evidence="workers/config/rollout.py, RolloutConfig.__post_init__",
        when=lambda c: c.get(f"{R}mode") == "sync",
    ),
    Fact(
        keys=("rollout.total_rollout_steps",),
        labels=("renamed",),
        why="counts prompts, not steps: verl's own YAML wants to call it total_rollout_samples",
        evidence="experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml",
        when=lambda c: c.is_async,
        releases=_SINCE_0_8,
    ),
    # -- reward -------------------------------------------------------------------------------
    Fact(
        keys=(
            f"{OVERLONG}len",
            f"{OVERLONG}penalty_factor",
            f"{OVERLONG}log",
            "*reward_kwargs.max_resp_len",
        ),
        labels=("inert",),
        why="overlong_buffer_cfg.enable is off, or the reward manager is not dapo",
        evidence="experimental/reward_loop/reward_manager/dapo.py",
        when=lambda c: not has_overlong_penalty(c),
        final=True,
    ),
    Fact(
        keys=(f"{OVERLONG}len",),
        labels=("trap",),
        why="it equals max_resp_len: switched on, every token would be punished",
        evidence="experimental/reward_loop/reward_manager/dapo.py",
        when=penalty_covers_all,
    ),
    Fact(
        keys=(
            "reward_model.reward_manager",
            "reward_model.reward_kwargs.*",
            "custom_reward_function.*",
        ),
        labels=("renamed",),
        why="moved below reward.; verl still moves the old name there",
        evidence="experimental/reward_loop/reward_loop.py, migrate_legacy_reward_impl",
        releases=_SINCE_0_8,
    ),
    Fact(
        keys=("algorithm.filter_groups.metric", "algorithm.filter_groups.max_*"),
        labels=("inert",),
        why="read under algorithm.filter_groups.enable, which is off",
        evidence="trainer/config/algorithm.py, FilterGroupsConfig",
        when=lambda c: not c.on("algorithm.filter_groups.enable"),
        final=True,
    ),
)
