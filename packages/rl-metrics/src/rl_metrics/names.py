"""The one list of metric names: ``<area>/<quantity>/<reduction>``, each with unit and meaning.

A name that is not in this list is an error where it is written, so that two places never call
the same number by two names, and a misspelt one never becomes an empty plot.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rl_metrics.histogram import STALENESS_BINS


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One number that a step may report."""

    name: str
    """``<area>/<quantity>/<reduction>``."""

    unit: str
    """Unit as printed; ``1`` for a plain ratio, ``fraction`` for a share from 0 to 1."""

    description: str
    """What it is, over what it was reduced, in one sentence."""


_ROWS = (
    ("reward/train/mean", "reward", "Mean reward of the step's sampled completions."),
    ("reward/train/std", "reward", "Standard deviation of those rewards, over the whole step."),
    ("reward/heldout/mean", "reward", "Mean reward on problems that are never trained on."),
    ("reward/unscorable/count", "completions", "Completions that the grader could not score."),
    (
        "reward/heldout_unscorable/count",
        "completions",
        "Completions on held-out problems that the grader could not score.",
    ),
    ("advantage/train/max", "reward", "Largest absolute advantage of the step."),
    (
        "loss/router_aux/mean",
        "1",
        "Load-balancing loss of the routers over all tokens of the step, without its coefficient.",
    ),
    ("groups/uniform/fraction", "fraction", "Groups whose members all have the same reward."),
    ("groups/set_aside/count", "groups", "Uniform groups that others were sampled in place of."),
    ("length/prompt/mean", "tokens", "Mean prompt length."),
    ("length/completion/mean", "tokens", "Mean length of the sampled completions."),
    ("length/completion/max", "tokens", "Longest sampled completion."),
    ("length/heldout/mean", "tokens", "Mean length of the completions on held-out problems."),
    ("length/stopped/fraction", "fraction", "Completions that the model ended by itself."),
    ("loss/policy/mean", "1", "Policy loss, divided by the global count that the loss names."),
    ("loss/kl/mean", "nats", "KL penalty as added to the loss, its coefficient included."),
    ("kl/ref/mean", "nats", "Mean KL estimate against the reference policy, per token."),
    ("ratio/clipped/fraction", "fraction", "Tokens or sequences whose gradient the clip cuts."),
    ("ratio/dual_clipped/fraction", "fraction", "Tokens that the dual clip bounds."),
    ("ratio/importance/mean", "1", "Mean importance ratio that the loss took."),
    ("ratio/importance/max", "1", "Largest importance ratio that the loss took."),
    ("entropy/policy/mean", "nats", "Mean entropy of the policy's next-token distribution."),
    (
        "mismatch/k3/mean",
        "nats",
        "Sampler against trainer: mean of r - 1 - log r with r = exp(proximal - rollout).",
    ),
    ("mismatch/k1/mean", "nats", "Sampler against trainer: mean of rollout - proximal."),
    ("mismatch/gap/fraction", "fraction", "Tokens for which the sampler reported no logprob."),
    ("mismatch/logprob/mean", "nats", "Mean absolute difference, proximal against rollout."),
    ("mismatch/logprob/max", "nats", "Largest absolute difference, proximal against rollout."),
    ("correction/weight/mean", "1", "Mean weight of the rollout correction, after its cap."),
    ("correction/weight_square/mean", "1", "Mean square of the rollout correction's weights."),
    ("correction/masked/fraction", "fraction", "Tokens that the rollout correction leaves out."),
    ("correction/at_cap/fraction", "fraction", "Tokens whose correction weight is at its cap."),
    ("gradient/norm/value", "1", "L2 norm of the whole gradient before clipping."),
    ("optimizer/learning_rate/value", "1", "Learning rate of the step."),
    ("policy/version/value", "steps", "Optimizer steps behind the weights after the step."),
    ("staleness/trajectory/mean", "steps", "Mean staleness of the trajectories trained on."),
    (
        "staleness/trajectory/max",
        "steps",
        "Largest staleness: trained version minus that of the trajectory's oldest token.",
    ),
    *(
        (
            f"staleness/{bin_.name}/trajectories",
            "trajectories",
            f"Trajectories trained on with a staleness of {bin_.label} steps.",
        )
        for bin_ in STALENESS_BINS
    ),
    (
        "partial/trajectory/fraction",
        "fraction",
        "Trajectories trained on whose tokens come from more than one policy version.",
    ),
    (
        "lost/groups/fraction",
        "fraction",
        "Groups of the step that were lost, after a fault, and sampled again.",
    ),
    ("queue/ready/value", "trajectories", "Finished and waiting when the trainer took its batch."),
    ("queue/in_flight/value", "trajectories", "Being sampled when the trainer took its batch."),
    ("idle/trainer/fraction", "fraction", "Step time in which the trainer waited for work."),
    (
        "idle/sampler/fraction",
        "fraction",
        "Step time in which a sampler had nothing to sample, publishes included; all samplers.",
    ),
    ("workers/restarted/count", "workers", "Workers that died and were started again."),
    ("trackers/missed/steps", "steps", "Steps that some tracker lacks, since the run began."),
    ("batch/sampled/sequences", "sequences", "Completions sampled for the step."),
    ("batch/trained/sequences", "sequences", "Sequences that the loss looked at."),
    ("batch/sampled/tokens", "tokens", "Tokens sampled for the step."),
    ("batch/trained/tokens", "tokens", "Tokens that went through the trainer, prompts included."),
    ("time/step/seconds", "s", "Wall time of the whole step."),
    ("time/sample/seconds", "s", "Wall time spent waiting for completions."),
    ("time/train/seconds", "s", "Wall time of the forward, backward and optimizer steps."),
    (
        "time/publish/seconds",
        "s",
        "Wall time of moving the new weights into the samplers, all publishes of the step.",
    ),
    ("time/publish/max", "s", "Wall time of the step's longest single publish."),
    ("time/publish_pause/seconds", "s", "Part of it in which samplers stood still; their mean."),
    (
        "time/handover/seconds",
        "s",
        "Wall time of handing devices over between trainer and samplers that take turns on them.",
    ),
    ("publish/step/count", "publishes", "Publishes of the step."),
    ("publish/weights/bytes", "bytes", "Bytes that one publish moved to one sampler."),
    ("time/evaluate/seconds", "s", "Wall time of the held-out evaluation."),
    ("time/checkpoint/seconds", "s", "Wall time of writing a checkpoint."),
    ("time/elapsed/seconds", "s", "Wall time since the run began, earlier parts included."),
    (
        "throughput/sampled/tokens_per_second",
        "tokens/s",
        "Sampled tokens per second of the whole step.",
    ),
    ("throughput/trained/tokens_per_second", "tokens/s", "Trained tokens per second of training."),
    (
        "throughput/sampled_per_device/tokens_per_second",
        "tokens/s",
        "Sampled tokens per second of the whole step and per device that samples.",
    ),
    (
        "throughput/trained_per_device/tokens_per_second",
        "tokens/s",
        "Trained tokens per second of training and per device that trains.",
    ),
    ("memory/device/max", "bytes", "Highest device memory of any training rank."),
)

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        name: Metric(name=name, unit=unit, description=description)
        for name, unit, description in _ROWS
    }
)
"""Every metric that can be written, by name, in the order in which reports show them."""


def check_names(names: Iterable[str]) -> None:
    """Refuse names that are not in `METRICS`.

    Raises:
        ValueError: names every unknown one with the nearest known names.
    """
    problems = []
    for name in names:
        if name in METRICS:
            continue
        nearest = difflib.get_close_matches(name, METRICS, n=3, cutoff=0.5)
        hint = f"nearest: {', '.join(nearest)}" if nearest else "no name is near"
        problems.append(f"unknown metric {name!r}; {hint}")
    if problems:
        problems.append("the list of names is rl_metrics.METRICS")
        raise ValueError("; ".join(problems))
