"""verl's settings translated: staleness and lead worked out by hand for each of its modes."""

import pytest

from async_policy import SchedulerConfig, VerlAsyncSettings, from_verl


def test_the_published_run_with_stale_samples() -> None:
    """512 prompts a publish, half as many ahead: 768 groups, 24 steps of 32, 23 at most stale."""
    translated = from_verl(
        VerlAsyncSettings(
            total_rollout_steps=512 * 400,
            ppo_mini_batch_size=32,
            require_batches=4,
            staleness_threshold=0.5,
            trigger_parameter_sync_step=4,
        )
    )
    assert translated.schedule == SchedulerConfig(
        num_steps=6400, groups_per_step=32, max_staleness=23
    )
    assert translated.publish_every == 16
    assert translated.in_flight == "abort"


def test_a_threshold_that_is_no_whole_number_of_steps_keeps_its_groups() -> None:
    """0.1 of 4 steps of 32: 140.8, so 140 groups and not the 160 of whole steps."""
    translated = from_verl(VerlAsyncSettings(total_rollout_steps=3200, ppo_mini_batch_size=32))
    assert translated.schedule.lead_groups == 140
    assert translated.schedule.max_staleness == 4
    assert translated.schedule.max_publish_interval == translated.publish_every == 4


def test_a_threshold_in_tenths_is_taken_as_written() -> None:
    """1.1 * 10 * 1 is 11 groups; in binary numbers (1 + 0.1) * 10 may come out below."""
    translated = from_verl(
        VerlAsyncSettings(
            total_rollout_steps=100,
            ppo_mini_batch_size=1,
            staleness_threshold=0.1,
            trigger_parameter_sync_step=10,
        )
    )
    assert translated.schedule.lead_groups == 11
    assert translated.schedule.max_staleness == 10


def test_the_on_policy_pipeline_is_the_synchronous_loop() -> None:
    """One step between publishes and nothing ahead: staleness 0, and the difference is told."""
    translated = from_verl(
        VerlAsyncSettings(
            total_rollout_steps=65,
            ppo_mini_batch_size=32,
            staleness_threshold=0.0,
            trigger_parameter_sync_step=1,
            partial_rollout=False,
        )
    )
    assert translated.schedule == SchedulerConfig(num_steps=2, groups_per_step=32, max_staleness=0)
    assert translated.publish_every == 1
    assert translated.in_flight == "wait"
    text = " ".join(translated.remarks)
    assert "the last 1 prompts are not sampled" in text
    assert "issue 4449" in text
    assert "verl aborts them and trains on the truncated completions" in text


def test_streaming_off_policy_publishes_every_fourth_step() -> None:
    """Nothing ahead, four steps between publishes: the fourth trains on data 3 steps old."""
    translated = from_verl(
        VerlAsyncSettings(total_rollout_steps=3200, ppo_mini_batch_size=32, staleness_threshold=0.0)
    )
    assert translated.schedule.max_staleness == 3
    assert translated.schedule.max_publish_interval == translated.publish_every == 4


def test_what_cannot_be_a_run_is_refused() -> None:
    """Fewer prompts than a step needs; a threshold that is no number."""
    with pytest.raises(ValueError, match=r"31 prompts are fewer than the 32 \(ppo_mini_batch"):
        from_verl(VerlAsyncSettings(total_rollout_steps=31, ppo_mini_batch_size=32))
    for threshold in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="staleness_threshold"):
            VerlAsyncSettings(
                total_rollout_steps=31, ppo_mini_batch_size=32, staleness_threshold=threshold
            )
