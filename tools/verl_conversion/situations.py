"""What of a configuration of verl decides which of its other settings are read."""

from verl_conversion.composed import Composed

A = "actor_rollout_ref.actor."
M = "actor_rollout_ref.model."
R = "actor_rollout_ref.rollout."
REF = "actor_rollout_ref.ref."

_REWARD_KWARGS = ("reward_model.reward_kwargs.", "reward.reward_kwargs.")


def has_engine_workers(c: Composed) -> bool:
    """Whether the newer workers run; in 0.7.1 the older ones did where nothing else was said."""
    return (
        c.release != "0.7.1"
        or c.engine == "veomni"
        or c.get("trainer.use_legacy_worker_impl") == "disable"
    )


def has_reference(c: Composed) -> bool:
    """`need_reference_policy` of verl."""
    return c.on("algorithm.use_kl_in_reward") or c.on(f"{A}use_kl_loss")


def has_critic(c: Composed) -> bool:
    """`need_critic` of verl."""
    enabled = c.get("critic.enable")
    return enabled is True or (enabled is None and c.get("algorithm.adv_estimator") == "gae")


def is_dynamic(c: Composed, key: str = f"{A}use_dynamic_bsz") -> bool:
    """Whether micro-batches are cut by tokens; the other switches follow the actor's by default."""
    return c.on(key) if key in c.set_here else c.on(f"{A}use_dynamic_bsz")


def bypasses(c: Composed) -> bool:
    """Whether the sampler's logprobs stand for those of the trainer."""
    return c.on("algorithm.rollout_correction.bypass_mode")


def reward_kwargs(c: Composed) -> str:
    """Below which path the reward manager's own settings stand: the older one is moved there."""
    older, newer = _REWARD_KWARGS
    return older if any(key.startswith(older) for key in c.set_here) else newer


def has_overlong_penalty(c: Composed) -> bool:
    """Whether the reward manager punishes length."""
    return reward_manager(c) == "dapo" and c.on(f"{reward_kwargs(c)}overlong_buffer_cfg.enable")


def reward_manager(c: Composed) -> str:
    """Which one is chosen, by the older name too."""
    older = c.get("reward_model.reward_manager")
    return str(older if older is not None else c.get("reward.reward_manager.name", "naive"))


def looks_textual(c: Composed) -> bool:
    """Whether the model's name says nothing of images or sounds."""
    name = str(c.get(f"{M}path", "")).lower()
    return not any(word in name for word in ("vl", "vision", "omni", "audio"))


def compiles(c: Composed) -> bool:
    """Whether verl's own compilation is on although the older switch is off."""
    switch = f"{A}fsdp_config.use_torch_compile"
    return c.engine == "dp" and c.on(switch) and not c.on(f"{A}use_torch_compile")


def strategies_differ(c: Composed) -> bool:
    """Whether the nested strategy is another one than the actor's."""
    return c.engine == "dp" and c.get(f"{A}fsdp_config.strategy") != c.get(f"{A}strategy")


def experts_do_not_fit(c: Composed) -> bool:
    """Whether RolloutConfig refuses the expert parallelism."""
    experts = c.count(f"{R}expert_parallel_size") or 1
    devices = (c.count(f"{R}tensor_model_parallel_size") or 1) * (
        c.count(f"{R}data_parallel_size") or 1
    )
    return experts > 1 and experts != devices


def both_clips(c: Composed) -> bool:
    """Whether both of the newer clips are given."""
    return None not in (c.get(f"{A}clip_ratio_low"), c.get(f"{A}clip_ratio_high"))


def penalty_covers_all(c: Composed) -> bool:
    """Whether the punished zone is as long as the longest completion."""
    buffer = c.count(f"{reward_kwargs(c)}overlong_buffer_cfg.len")
    longest = c.count(f"{reward_kwargs(c)}max_resp_len")
    return None not in (buffer, longest) and buffer == longest


def cut_not_refused(c: Composed) -> bool:
    """Whether longer prompts are cut where the launch asks for something else."""
    return c.get("data.truncation") != "left" and not c.on("data.filter_overlong_prompts")


def steps_of_verl(c: Composed) -> str:
    """How many publishes a fully asynchronous run has, as verl counts it."""
    prompts = c.count("rollout.total_rollout_steps") or 0
    each = (
        (c.count(f"{A}ppo_mini_batch_size") or 0)
        * (c.count("async_training.require_batches") or 0)
        * (c.count("async_training.trigger_parameter_sync_step") or 0)
    )
    return str(prompts // each) if each else "unknown"
