"""verl's settings for fully asynchronous training, and what they are called here.

verl's `fully_async_policy` has three numbers and a flag (recipe/fully_async_policy/README.md and
config/fully_async_ppo_trainer.yaml, verl 1dda039b9); the modes of its documentation are points in
their space:

=============================  ===========================================================
verl's mode                    its settings
=============================  ===========================================================
on-policy pipeline             trigger_parameter_sync_step 1, staleness_threshold 0
stream off-policy              trigger_parameter_sync_step above 1, staleness_threshold 0
async with stale samples       staleness_threshold above 0, partial_rollout False
async with partial rollout     staleness_threshold above 0, partial_rollout True
=============================  ===========================================================

Here they are three numbers of the scheduler and the loop: groups per optimizer step, how far
sampling may be ahead, and how often weights are published.
"""

import math
from fractions import Fraction
from typing import Literal

import attrs

from async_policy.schedule import SchedulerConfig

InFlight = Literal["abort", "wait"]


@attrs.frozen(kw_only=True)
class VerlAsyncSettings:
    """The settings by their names in verl, with verl's defaults."""

    total_rollout_steps: int = attrs.field(validator=attrs.validators.ge(1))
    """``rollout.total_rollout_steps``: prompts of the whole run."""

    ppo_mini_batch_size: int = attrs.field(validator=attrs.validators.ge(1))
    """``actor_rollout_ref.actor.ppo_mini_batch_size``: prompts of one optimizer step."""

    require_batches: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """``async_training.require_batches``: mini-batches that the trainer waits for before it begins
    to train on the first of them."""

    staleness_threshold: float = attrs.field(default=0.1, validator=attrs.validators.ge(0.0))
    """``async_training.staleness_threshold``: prompts sampled ahead of a publish, as a share of
    those that are consumed between two publishes."""

    trigger_parameter_sync_step: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    """``async_training.trigger_parameter_sync_step``: waits of the trainer, of `require_batches`
    mini-batches each, between two publishes."""

    partial_rollout: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    """``async_training.partial_rollout``: whether a publish interrupts running requests, which go
    on afterwards from what they have."""

    @staleness_threshold.validator
    def _finite(self, _: object, value: float) -> None:
        if not math.isfinite(value):
            message = f"staleness_threshold: expected a finite number of at least 0, got {value}"
            raise ValueError(message)


@attrs.frozen(kw_only=True)
class VerlTranslation:
    """The same run in the terms of this package."""

    schedule: SchedulerConfig
    """For `Scheduler`."""

    publish_every: int
    """Optimizer steps between two publishes."""

    in_flight: InFlight
    """What a publish does with running requests: ``abort`` has them go on from their prefix,
    ``wait`` lets them end first. See rollout-vllm."""

    remarks: tuple[str, ...]
    """What is not the same as in verl, a sentence each."""


def from_verl(settings: VerlAsyncSettings) -> VerlTranslation:
    """The run that these settings of verl describe.

    verl publishes after ``P = trigger_parameter_sync_step * require_batches`` optimizer steps and
    samples, from one publish to the next, at most ``(1 + staleness_threshold) * P`` mini-batches,
    those left over from before included (fully_async_rollouter.py, ``max_required_samples``). The
    last of them is trained on ``ceil((1 + staleness_threshold) * P) - 1`` optimizer steps after the
    weights that it was drawn from. verl's own measure of staleness counts publishes instead.

    Raises:
        ValueError: if the prompts are fewer than one optimizer step needs.
    """
    publish_every = settings.trigger_parameter_sync_step * settings.require_batches
    size = settings.ppo_mini_batch_size
    num_steps, left_over = divmod(settings.total_rollout_steps, size)
    if num_steps == 0:
        message = (
            f"from_verl: total_rollout_steps = {settings.total_rollout_steps} prompts are fewer "
            f"than the {size} (ppo_mini_batch_size) of one optimizer step"
        )
        raise ValueError(message)
    # by decimal digits: 1 + 0.1 in binary would round a whole number of groups down
    threshold = Fraction(str(settings.staleness_threshold))
    lead_groups = math.floor((1 + threshold) * publish_every * size)
    max_staleness = -(-lead_groups // size) - 1
    remarks = []
    if left_over:
        remarks.append(
            f"total_rollout_steps = {settings.total_rollout_steps} is no multiple of "
            f"ppo_mini_batch_size = {size}: the last {left_over} prompts are not sampled (verl "
            "samples and drops them)"
        )
    if settings.require_batches > 1:
        remarks.append(
            f"require_batches = {settings.require_batches}: an optimizer step starts as soon as "
            "its own mini-batch is complete, so only the interval between publishes is kept"
        )
    if max_staleness == 0:
        remarks.append(
            "no prompt is sampled from weights older than those that train on it; verl's on-policy "
            "pipeline lets prompts start before the publish (verl issue 4449)"
        )
    if not settings.partial_rollout:
        remarks.append(
            "partial_rollout = False: running requests end before weights change; verl aborts them "
            "and trains on the truncated completions (llm_server.py, verl 1dda039b9)"
        )
    remarks.append(
        "batches are trained on in the order of the prompts, not in the order in which they "
        "are completed, and nothing is dropped"
    )
    return VerlTranslation(
        schedule=SchedulerConfig(
            num_steps=num_steps,
            groups_per_step=size,
            max_staleness=max_staleness,
            max_lead_groups=None if lead_groups % size == 0 else lead_groups,
        ),
        publish_every=publish_every,
        in_flight="abort" if settings.partial_rollout else "wait",
        remarks=tuple(remarks),
    )
