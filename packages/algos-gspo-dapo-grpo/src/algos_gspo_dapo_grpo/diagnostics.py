"""What to watch, as detached shares that add up over micro-batches and ranks.

Each value is a sum over this micro-batch divided by a count of the whole batch, like the loss
itself (see `aggregation`). The largest mismatch is the one that cannot be a share, so it is a
function of its own.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.aggregation import BatchCounts
from algos_gspo_dapo_grpo.kl import kl_k1, kl_k3
from algos_gspo_dapo_grpo.precision import at_least_float32
from algos_gspo_dapo_grpo.rollout_correction import (
    CorrectionWeights,
    ImportanceWeighting,
    WeightMasking,
)
from algos_gspo_dapo_grpo.shapes import check_one_shape
from algos_gspo_dapo_grpo.surrogate import Surrogate


def share(
    values: Float[Tensor, "*units"] | Bool[Tensor, "*units"],
    mask: Bool[Tensor, "*units"],
    count: int,
) -> Float[Tensor, ""]:
    """Sum of the values on the mask, divided by the batch's count; detached, 0 if that is 0."""
    check_one_shape("a metric's share", values=values, mask=mask)
    values = values.detach()
    if values.dtype == torch.bool:
        values = values.to(torch.float32)
    return torch.where(mask, values, 0.0).sum() / max(count, 1)


def surrogate_metrics(
    surrogate: Surrogate, mask: Bool[Tensor, "*units"], count: int
) -> dict[str, Float[Tensor, ""]]:
    """Shares of the mean ratio and of the clipped fractions.

    Args:
        surrogate: what a loss function of this package returned.
        mask: the units that count: tokens in the loss mask, or live sequences for GSPO.
        count: how many of these units the whole batch has.

    Returns:
        ``ratio/importance/mean`` (unit 1), ``ratio/clipped/fraction`` and, with a dual clip,
        ``ratio/dual_clipped/fraction``.
    """
    metrics = {
        "ratio/importance/mean": share(surrogate.ratios, mask, count),
        "ratio/clipped/fraction": share(surrogate.clipped, mask, count),
    }
    if surrogate.dual_clipped is not None:
        metrics["ratio/dual_clipped/fraction"] = share(surrogate.dual_clipped, mask, count)
    return metrics


def _known(rollout_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    return loss_mask & torch.isfinite(rollout_logprobs)


def mismatch_metrics(
    proximal_logprobs: Float[Tensor, "*layout"],
    rollout_logprobs: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    *,
    counts: BatchCounts,
) -> dict[str, Float[Tensor, ""]]:
    """Shares of how far the sampler's policy is from the trainer's, per token in the mask.

    Args:
        proximal_logprobs: computed by the trainer, in nats.
        rollout_logprobs: reported by the sampler, in nats; NaN or infinite where it reported
            none, which counts as no mismatch and shows in the gap fraction.
        loss_mask: True on the sampled tokens.
        counts: sizes of the whole batch.

    Returns:
        ``mismatch/k1/mean`` and ``mismatch/k3/mean``: estimates of KL(rollout || proximal) in
        nats (see `kl` for the cap of k3); ``mismatch/logprob/mean``: mean absolute
        difference in nats; ``mismatch/gap/fraction``: tokens without a rollout log-probability.
    """
    known = _known(rollout_logprobs, loss_mask)
    k1 = kl_k1(rollout_logprobs.detach(), proximal_logprobs.detach())
    k3 = kl_k3(rollout_logprobs.detach(), proximal_logprobs.detach())
    return {
        "mismatch/k1/mean": share(k1, known, counts.num_tokens),
        "mismatch/k3/mean": share(k3, known, counts.num_tokens),
        "mismatch/logprob/mean": share(k1.abs(), known, counts.num_tokens),
        "mismatch/gap/fraction": share(
            ~torch.isfinite(rollout_logprobs), loss_mask, counts.num_tokens
        ),
    }


def correction_metrics(
    weighting: CorrectionWeights,
    loss_mask: Bool[Tensor, "*layout"],
    *,
    config: ImportanceWeighting,
    counts: BatchCounts,
) -> dict[str, Float[Tensor, ""]]:
    """Shares of what a rollout correction did, per token in the mask, unit 1.

    Returns:
        ``correction/weight/mean`` and ``correction/weight_square/mean``, which
        `effective_sample_fraction` makes the effective sample size of;
        ``correction/at_cap/fraction`` for truncated weights, ``correction/masked/fraction`` for
        weights that are set to 0.
    """
    weights, bounded, _ = weighting
    effect = "masked" if isinstance(config, WeightMasking) else "at_cap"
    return {
        "correction/weight/mean": share(weights, loss_mask, counts.num_tokens),
        "correction/weight_square/mean": share(weights.square(), loss_mask, counts.num_tokens),
        f"correction/{effect}/fraction": share(bounded, loss_mask, counts.num_tokens),
    }


def entropy_estimate(
    logprobs: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    *,
    counts: BatchCounts,
) -> Float[Tensor, ""]:
    """Share of the mean of ``-log pi`` over the sampled tokens, in nats, detached.

    In expectation it is the policy's entropy, if `logprobs` are those of the policy that sampled;
    the exact entropy needs the logits, which this package never sees.
    """
    return share(-at_least_float32(logprobs), loss_mask, counts.num_tokens)


def max_abs_mismatch(
    proximal_logprobs: Float[Tensor, "*layout"],
    rollout_logprobs: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
) -> Float[Tensor, ""]:
    """Largest ``|proximal - rollout|`` in the mask, in nats, detached; 0 if there is none.

    Not a share: over micro-batches and ranks the *maximum* is taken, not the sum. Gaps (no finite
    value in `rollout_logprobs`) do not count; NaN in `proximal_logprobs` shows.
    """
    difference = (
        at_least_float32(proximal_logprobs.detach()) - at_least_float32(rollout_logprobs.detach())
    ).abs()
    masked = torch.where(_known(rollout_logprobs, loss_mask), difference, 0.0)
    # The extra 0 is the maximum of an empty tensor, which amax refuses.
    return torch.cat([masked.reshape(-1), masked.new_zeros(1)]).amax()
