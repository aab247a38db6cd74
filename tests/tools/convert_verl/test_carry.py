"""What verl's settings mean here, in numbers worked out by hand."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from verl_conversion.conversion import Conversion, Line, convert
from verl_conversion.launches import PROGRAMS, LaunchError, launch_of
from verl_conversion.overrides import Value
from verl_conversion.releases import RELEASES, Release, defaults_of

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
M = "actor_rollout_ref.model."
OVERLONG = "+reward.reward_kwargs.overlong_buffer_cfg."


def sync(*overrides: str, rows: int | None = None, release: Release = "0.9.1") -> Conversion:
    argv = ["-m", "verl.trainer.main_ppo", "trainer.total_training_steps=10", *overrides]
    return convert(launch_of(argv), release, train_rows=rows)


def fully_async(*overrides: str) -> Conversion:
    program = "verl.experimental.fully_async_policy.fully_async_main"
    return convert(launch_of(["-m", program, "data.train_batch_size=0", *overrides]), "0.9.1")


def values(conversion: Conversion, *paths: str) -> list[Value]:
    return [
        conversion.settings[path].value if path in conversion.settings else None for path in paths
    ]


def line(conversion: Conversion, override: str) -> Line:
    (found,) = (found for found in conversion.lines if found.override == override)
    return found


def test_mini_batches_become_optimizer_steps() -> None:
    """64 prompts a round in mini-batches of 16: 4 optimizer steps, the last one 3 steps stale."""
    found = sync(
        "data.train_batch_size=64",
        f"{A}ppo_mini_batch_size=16",
        "trainer.test_freq=5",
        "trainer.save_freq=2",
        f"{A}optim.lr_warmup_steps=3",
    )
    assert values(
        found,
        "loop.num_steps",
        "loop.groups_per_step",
        "loop.publish_every",
        "loop.max_staleness",
        "loop.evaluate_every",
        "run.checkpoint_every",
        "engine.optim.warmup_steps",
    ) == [40, 16, 4, 3, 20, 8, 12]


def test_epochs_need_the_number_of_prompts() -> None:
    """1000 prompts in batches of 64 are 15 whole rounds; 2 epochs of one step each are 30."""
    epochs = [
        "trainer.total_training_steps=null",
        "trainer.total_epochs=2",
        "data.train_batch_size=64",
        f"{A}ppo_mini_batch_size=64",
    ]
    assert values(sync(*epochs, rows=1000), "loop.num_steps") == [30]
    unknown = sync(*epochs)
    assert values(unknown, "loop.num_steps") == [None]
    assert line(unknown, "trainer.total_epochs=2").decide
    assert "--train-rows N" in line(unknown, "trainer.total_epochs=2").why[0]


def test_a_batch_that_is_no_multiple_is_refused() -> None:
    found = sync("data.train_batch_size=48", f"{A}ppo_mini_batch_size=32")
    assert "got 48 and 32" in line(found, "data.train_batch_size=48").why[0]


def test_the_asynchronous_settings_go_through_async_policy() -> None:
    """P = 2 steps between publishes; 1.75 * 2 = 3.5 mini-batches ahead: at most 3 steps stale."""
    found = fully_async(
        "rollout.total_rollout_steps=3200",
        f"{A}ppo_mini_batch_size=16",
        "async_training.staleness_threshold=0.75",
        "async_training.trigger_parameter_sync_step=2",
        "trainer.test_freq=25",
        f"{A}optim.lr_warmup_steps=10",
    )
    paths = ("num_steps", "publish_every", "max_staleness", "groups_per_step", "evaluate_every")
    assert values(found, *(f"loop.{name}" for name in paths)) == [200, 2, 3, 16, 50]
    assert values(found, "engine.optim.warmup_steps") == [10]
    (staleness,) = line(found, "async_training.staleness_threshold=0.75").to
    assert staleness.note == "verl stops at 56 prompts ahead, between two steps; here at 64"


def test_waiting_for_several_batches_multiplies() -> None:
    """4 waits of 4 mini-batches between publishes; the schedule steps once a wait."""
    found = fully_async(
        "rollout.total_rollout_steps=51200",
        f"{A}ppo_mini_batch_size=32",
        "async_training.require_batches=4",
        "async_training.trigger_parameter_sync_step=4",
        f"{A}optim.lr_warmup_steps=10",
    )
    assert values(found, "loop.num_steps", "loop.publish_every", "engine.optim.warmup_steps") == [
        1600,
        16,
        40,
    ]


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("token-mean", "token_mean"),
        ("seq-mean-token-sum", "sequence_mean_token_sum"),
        ("seq-mean-token-mean", "sequence_mean_token_mean"),
    ],
)
def test_aggregation(mode: str, kind: str) -> None:
    found = sync(f"{A}loss_agg_mode={mode}")
    assert values(found, "loop.loss.aggregation.kind") == [kind]


def test_the_normaliser_is_the_longest_completion_where_none_is_given() -> None:
    paths = ("loop.loss.aggregation.kind", "loop.loss.aggregation.normaliser")
    norm = (f"{A}loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=300")
    assert values(sync(*norm), *paths) == ["fixed_normaliser", 300.0]
    given = sync(*norm, f"{A}loss_scale_factor=128")
    assert values(given, *paths) == ["fixed_normaliser", 128.0]
    assert (
        "no counterpart"
        in line(sync(f"{A}loss_agg_mode=token-sum"), f"{A}loss_agg_mode=token-sum").labels
    )


def test_clips_and_the_dual_clip_that_verl_has_by_default() -> None:
    found = sync(f"{A}clip_ratio_low=0.1", f"{A}clip_ratio_high=0.28")
    paths = ("loop.loss.kind", "loop.loss.clip_low", "loop.loss.clip_high", "loop.loss.dual_clip")
    assert values(found, *paths) == ["grpo", 0.1, 0.28, 3.0]
    gspo = sync(f"{A}policy_loss.loss_mode=gspo", f"{A}clip_ratio_c=10")
    assert values(gspo, "loop.loss.kind", "loop.loss.dual_clip") == ["gspo", None]


def test_one_clip_for_both_sides_has_no_effect() -> None:
    """`clip_ratio_low` and `_high` are 0.2 by default and win."""
    found = sync(f"{A}clip_ratio=0.4")
    assert set(line(found, f"{A}clip_ratio=0.4").labels) == {"renamed", "inert", "trap"}
    assert values(found, "loop.loss.clip_low") == [0.2]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("low_var_kl", "k3"), ("k3", "k3"), ("mse", "k2"), ("abs", "abs"), ("k3+", "k3+")],
)
def test_kl_estimators(theirs: str, ours: str) -> None:
    found = sync(f"{A}use_kl_loss=True", f"{A}kl_loss_coef=0.02", f"{A}kl_loss_type={theirs}")
    paths = ("loop.loss.kl.coefficient", "loop.loss.kl.estimator")
    assert values(found, *paths) == [0.02, ours]


def test_kl_terms_that_do_nothing() -> None:
    biased = sync(f"{A}use_kl_loss=True", f"{A}kl_loss_type=kl")
    assert "ignores the reference" in line(biased, f"{A}kl_loss_type=kl").why[0]
    zero = sync(f"{A}use_kl_loss=True", f"{A}kl_loss_coef=0")
    assert "costs a reference policy and changes nothing" in line(zero, f"{A}kl_loss_coef=0").why[0]
    assert values(zero, "loop.loss.kl.coefficient") == [None]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("trainer.v1.trainer_mode=separate_async", "the schedule of 'sync'"),
        ("data.gen_batch_size=3072", "verl draws 3072 prompts"),
        ("custom_reward_function.path=my.py", "code of your own, which is not run"),
        ("algorithm.filter_groups.enable=True", "left out of the batch, not replaced"),
        (f"{A}entropy_coeff=0.01", "no loss here has an entropy bonus"),
        ("algorithm.adv_estimator=gae", "no estimator of this loop"),
        ("algorithm.use_kl_in_reward=True", "no KL in the reward"),
        (f"{A}ppo_epochs=2", "2 passes over the same samples"),
        (f"{R}top_p=0.9", "from the whole distribution"),
        (f"{R}name=sglang", "the sampler is vLLM"),
        (f"{R}n=1", "no siblings"),
        (f"{R}ignore_eos=True", "ends where the model ends it"),
        ("reward.custom_reward_function.path=my.py", "code of your own, which is not run"),
        ("data.prompt_key=question", "the column of the prompts is called prompt here"),
        (f"{A}optim.optimizer=AdamW8bit", "here it is AdamW"),
        (f"{R}val_kwargs.temperature=0.6", "evaluations sample as training does"),
    ],
)
def test_what_has_no_counterpart_says_why(override: str, reason: str) -> None:
    found = line(sync(override), override)
    assert found.decide
    assert any(reason in why for why in found.why), found.why


def test_advantages() -> None:
    paths = ("loop.advantages.kind",)
    assert values(sync("algorithm.adv_estimator=grpo"), *paths) == ["grpo"]
    plain = sync("algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=False")
    assert values(plain, *paths) == ["dr_grpo"]
    assert values(sync("algorithm.adv_estimator=rloo"), *paths) == ["rloo"]


def test_the_overlong_buffer() -> None:
    found = sync(
        "reward.reward_manager.name=dapo",
        f"{OVERLONG}enable=True",
        f"{OVERLONG}len=100",
        f"{OVERLONG}penalty_factor=0.5",
        "+reward.reward_kwargs.max_resp_len=512",
        "data.max_response_length=512",
    )
    paths = ("max_length", "buffer", "factor")
    assert values(found, *(f"loop.overlong.{name}" for name in paths)) == [512, 100, 0.5]
    assert line(found, f"{OVERLONG}len=100").labels == ("carried",)


def test_the_overlong_buffer_under_its_older_name() -> None:
    """Where scripts from before `reward.` have it; verl moves it."""
    base = "reward_model.reward_kwargs."
    found = sync(
        "reward_model.reward_manager=dapo",
        f"+{base}overlong_buffer_cfg.enable=True",
        f"+{base}overlong_buffer_cfg.len=100",
        f"+{base}max_resp_len=512",
    )
    assert values(found, "loop.overlong.max_length", "loop.overlong.buffer") == [512, 100]
    assert set(line(found, f"+{base}max_resp_len=512").labels) == {"carried", "renamed"}


@pytest.mark.parametrize(
    ("flags", "expected", "reason"),
    [
        (("True", "True"), "parameters", "here they stay there"),
        (("False", "False"), None, "off, as here"),
        (("True", "False"), None, "only one of the two is on"),
    ],
)
def test_offloading(flags: tuple[str, str], expected: str | None, reason: str) -> None:
    key = f"{A}fsdp_config.param_offload={flags[0]}"
    found = sync(key, f"{A}fsdp_config.optimizer_offload={flags[1]}")
    assert values(found, "engine.offload") == [expected]
    about = line(found, key)
    assert any(reason in text for text in (*about.why, *(s.note for s in about.to)))


def test_activations_on_the_host_need_checkpointing() -> None:
    """Which is on in verl unless it is switched off; without it verl sends more than inputs."""
    on, kept = f"{M}enable_activation_offload=True", f"{M}enable_gradient_checkpointing=False"
    paths = ("engine.activation_checkpointing", "engine.offload_activations")
    found = sync(on)
    assert values(found, *paths) == ["full", True]
    assert (line(found, on).labels, line(found, on).decide) == (("carried",), False)
    without = sync(on, kept)
    assert values(without, *paths) == ["none", None]
    for override in (on, kept):
        assert line(without, override).decide
        assert "verl sends all that a layer keeps" in line(without, override).why[0]
    off = line(sync(f"{M}enable_activation_offload=False"), f"{M}enable_activation_offload=False")
    assert (off.labels, off.decide) == (("carried", "default"), False)


def test_veomni_has_activations_on_the_device() -> None:
    on = f"{M}enable_activation_offload=True"
    found = sync("model_engine=veomni", on)
    assert values(found, "engine.offload_activations") == [None]
    assert line(found, on).decide
    assert "engine-veomni keeps activations on the device" in line(found, on).why[0]


def test_ranks_of_fsdp() -> None:
    """2 nodes of 8, 4 ranks to a sequence, shards over 8 ranks: 4 data ranks, 2 copies."""
    found = sync(
        "trainer.nnodes=2",
        f"{A}ulysses_sequence_parallel_size=4",
        f"{A}fsdp_config.fsdp_size=8",
    )
    paths = ("dp_size", "ulysses_size", "dp_replicate_size")
    assert values(found, *(f"engine.parallel.{name}" for name in paths)) == [4, 4, 2]


def test_ranks_of_veomni() -> None:
    found = sync(
        "model_engine=veomni", f"{A}veomni.expert_parallel_size=8", f"{A}veomni.fsdp_size=4"
    )
    assert values(
        found,
        "engine.kind",
        "engine.parallel.dp_size",
        "engine.parallel.dp_replicate_size",
        "engine.parallel.extra_parallel_sizes.ep",
    ) == ["veomni", 8, 2, 8]


def test_veomni_reads_no_warmup_steps() -> None:
    found = sync("model_engine=veomni", f"{A}optim.lr_warmup_steps=5")
    assert {"inert", "renamed"} <= set(line(found, f"{A}optim.lr_warmup_steps=5").labels)
    assert values(found, "engine.optim.warmup_steps") == [None]
    ratio = sync("model_engine=veomni", f"{A}optim.lr_warmup_steps_ratio=0.3")
    assert values(ratio, "engine.optim.warmup_steps") == [12]  # 3 of 10 rounds, 4 steps in each


def test_micro_batches() -> None:
    lengths = ("data.max_prompt_length=100", "data.max_response_length=400")
    budget = ("loop.max_tokens_per_micro_batch",)
    rows = sync(*lengths, f"{A}ppo_micro_batch_size_per_gpu=4")
    assert values(rows, *budget) == [2000]
    dynamic = (f"{A}use_dynamic_bsz=True", f"{A}ppo_max_token_len_per_gpu=3000")
    assert values(sync(*lengths, *dynamic), *budget) == [3000]
    shared = sync(*lengths, *dynamic, f"{A}ulysses_sequence_parallel_size=2")
    assert values(shared, *budget) == [6000]
    small = sync(*lengths, f"{A}use_dynamic_bsz=True", f"{A}ppo_max_token_len_per_gpu=300")
    assert values(small, *budget) == [500]


def test_servers_become_copies_of_one_engine_or_several() -> None:
    """8 devices with tensor parallelism of 2 are 4 servers in verl.

    Experts are spread over all devices of an engine, so servers that share them stay apart.
    """
    paths = ("tensor_parallel_size", "data_parallel_size", "expert_parallel_size")
    found = sync(f"{R}tensor_model_parallel_size=2")
    assert values(found, *(f"sampler.{name}" for name in paths)) == [2, 4, 1]
    experts = sync(f"{R}tensor_model_parallel_size=2", f"{R}expert_parallel_size=2")
    assert values(experts, *(f"sampler.{name}" for name in paths)) == [2, 1, 2]
    assert values(experts, "num_samplers") == [4]
    assert values(found, "num_samplers") == [None]


def test_expert_parallelism_that_verl_refuses_is_broken() -> None:
    found = line(sync(f"{R}expert_parallel_size=4"), f"{R}expert_parallel_size=4")
    assert "broken" in found.labels
    assert line(sync(f"{R}mode=sync"), f"{R}mode=sync").labels == ("broken",)


def test_arguments_of_vllm_are_asked_of_the_sampler() -> None:
    kwargs = f"+{R}engine_kwargs.vllm."
    found = sync(f"{kwargs}max_logprobs=5", f"{kwargs}quantization=fp8", f"{kwargs}no_such=1")
    assert values(found, "sampler.engine_args.max_logprobs") == [5]
    for override in (f"{kwargs}quantization=fp8", f"{kwargs}no_such=1"):
        about = line(found, override)
        assert about.labels == ("no counterpart",)
        assert about.decide
    assert "nearest" in line(found, f"{kwargs}no_such=1").why[0]


def test_sleep_follows_the_place_of_the_sampler() -> None:
    assert values(sync(), "sampler.enable_sleep") == [True]
    assert values(sync(f"{R}free_cache_engine=False"), "sampler.enable_sleep") == [False]
    assert values(fully_async(f"{R}free_cache_engine=True"), "sampler.enable_sleep") == [False]


def test_what_is_not_known_is_said() -> None:
    found = sync("+trainer.brand_new=1", "trainer.brand_new=1", f"{A}shuffle=True")
    assert line(found, "trainer.brand_new=1").labels[-1] in {"duplicate", "unknown", "broken"}
    added = line(sync("+trainer.brand_new=1"), "+trainer.brand_new=1")
    assert added.labels == ("unknown",)
    assert "not in the table of verl 0.9.1" in added.why[0]
    missing = line(sync("trainer.brand_new=1"), "trainer.brand_new=1")
    assert missing.labels == ("broken",)
    assert "verl 0.9.1 has no setting trainer.brand_new" in missing.why[0]
    ruled = line(found, f"{A}shuffle=True")
    assert ruled.labels == ("unknown",)
    assert "has no rule" in ruled.why[0]
    odd = line(sync(f"{R}temperature=hot"), f"{R}temperature=hot")
    assert (odd.labels, odd.decide) == (("unknown",), True)


def test_what_is_hydras_own() -> None:
    found = sync("hydra.run.dir=out", "+optim@actor_rollout_ref.actor.optim=fsdp")
    assert [(line.labels, line.decide) for line in found.lines[1:]] == [
        (("no counterpart",), False),
        (("unknown",), True),
    ]


def test_a_setting_of_another_release_is_named() -> None:
    gone = "reward_manager.name=dapo"
    here = line(
        sync("trainer.use_legacy_worker_impl=disable"), "trainer.use_legacy_worker_impl=disable"
    )
    assert "it is one of verl 0.7.1" in here.why[0]
    assert "broken" in line(sync(gone), gone).labels


def test_what_the_script_alone_can_tell_is_unresolved() -> None:
    found = sync("data.train_batch_size=64", "trainer.nnodes=1,2")
    assert "is a sweep" in line(found, "trainer.nnodes=1,2").why[0]


KEYS = [
    key
    for key in defaults_of("0.9.1", "fully_async", "dp").values
    if key.startswith(("actor_rollout_ref.", "data.", "trainer.", "rollout.", "async_training."))
]
ODD = [
    "0",
    "-1",
    "7",
    "null",
    "x",
    "[]",
    "{}",
    "[1,2]",
    "False",
    "nan",
    "-inf",
    "",
    "{a:1}",
    "${x}",
]


@given(
    overrides=st.lists(
        st.builds(
            lambda sign, key, value: f"{sign}{key}={value}",
            st.sampled_from(["", "", "", "+", "++", "~"]),
            st.sampled_from(KEYS),
            st.sampled_from(ODD),
        ),
        max_size=8,
    ),
    program=st.sampled_from(list(PROGRAMS)),
    release=st.sampled_from(RELEASES),
)
@settings(max_examples=60)
def test_every_override_gets_a_line_whatever_it_says(
    overrides: list[str], program: str, release: Release
) -> None:
    found = convert(launch_of(["-m", program, *overrides]), release, train_rows=100)
    assert [line.override for line in found.lines] == overrides
    assert all(line.labels for line in found.lines)


def test_other_engines_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"expected dp \(FSDP\) or veomni"):
        sync("model_engine=megatron")
