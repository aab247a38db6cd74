"""One call for training loops: from log-probabilities to this micro-batch's share of the loss."""

from typing import NamedTuple, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.aggregation import BatchCounts, aggregate
from algos_gspo_dapo_grpo.dapo import DapoLoss, dapo_token_losses
from algos_gspo_dapo_grpo.diagnostics import mismatch_metrics, share, surrogate_metrics
from algos_gspo_dapo_grpo.grpo import GrpoLoss, grpo_token_losses
from algos_gspo_dapo_grpo.gspo import GspoLoss, gspo_sequence_losses
from algos_gspo_dapo_grpo.kl import KlPenalty, kl_penalty
from algos_gspo_dapo_grpo.precision import at_least_float32
from algos_gspo_dapo_grpo.rollout_correction import truncated_weights
from algos_gspo_dapo_grpo.sequences import Sequences
from algos_gspo_dapo_grpo.surrogate import Surrogate

PolicyLoss = GrpoLoss | DapoLoss | GspoLoss
"""Which loss, with its numbers; `describe` prints the formula."""


class LossShare(NamedTuple):
    """One micro-batch's part; the parts of all micro-batches and ranks are added up."""

    loss: Float[Tensor, ""]
    """Share of the loss; carries the gradient."""

    metrics: dict[str, Float[Tensor, ""]]
    """Detached shares of means; see `diagnostics` for names and units."""


def policy_loss(
    policy_logprobs: Float[Tensor, "*layout"],
    *,
    proximal_logprobs: Float[Tensor, "*layout"] | None,
    advantages: Float[Tensor, " sequences"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    config: PolicyLoss,
    counts: BatchCounts,
    rollout_logprobs: Float[Tensor, "*layout"] | None = None,
    ref_logprobs: Float[Tensor, "*layout"] | None = None,
) -> LossShare:
    """Compute the loss that `config` names, for one micro-batch of any layout.

    Args:
        policy_logprobs: log-probability of each token under the weights in training, in nats; the
            only input that carries a gradient. What stands outside the mask is ignored.
        proximal_logprobs: the same under the weights at the start of the step. None says that
            these are the weights in training, as in the only optimizer step on a batch: the
            ratio is then 1 and its gradient that of `policy_logprobs`.
        advantages: one per sequence, in reward units.
        loss_mask: True on the sampled tokens that count.
        sequences: boundaries of the sequences; each is whole in this micro-batch.
        config: the loss and its numbers.
        counts: sizes of everything that this optimizer step looks at; see `BatchCounts`.
        rollout_logprobs: what the sampler reported, in nats, NaN or infinite where
            it reported nothing.
            Needed by a rollout correction; if given, the mismatch metrics are returned too.
        ref_logprobs: under a frozen reference, in nats. Needed by a KL term, refused without.

    Returns:
        Shares of the loss and of the metrics, to be added up over micro-batches and ranks:
        ``loss/policy/mean``; ``ratio/...`` (over tokens; over sequences for GSPO);
        ``mismatch/...`` with `rollout_logprobs`; ``correction/...`` with a rollout correction;
        with a KL term ``kl/ref/mean`` (nats, over tokens) and ``loss/kl/mean`` (as added to the
        loss, with its coefficient).

    Raises:
        ValueError: if a shape does not fit `sequences`, or a tensor that the configuration needs
            is missing, or one is given that it cannot use.
    """
    _check_shapes(
        sequences,
        advantages,
        policy_logprobs=policy_logprobs,
        proximal_logprobs=proximal_logprobs,
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        ref_logprobs=ref_logprobs,
    )
    # Masked once, first: whatever a later term makes of places outside, no gradient gets past here.
    policy = torch.where(loss_mask, at_least_float32(policy_logprobs), 0.0)
    proximal = policy.detach() if proximal_logprobs is None else proximal_logprobs
    advantages = advantages.detach().to(policy.dtype)
    token_losses, metrics = _surrogate_losses(
        policy, proximal, advantages, loss_mask, sequences, config=config, counts=counts
    )

    if rollout_logprobs is not None:
        metrics |= mismatch_metrics(proximal, rollout_logprobs, loss_mask, counts=counts)
    if config.rollout_correction is not None:
        if rollout_logprobs is None:
            raise ValueError(
                "policy_loss: rollout_correction is set and needs rollout_logprobs, got None; give "
                "the sampler's log-probabilities, or set rollout_correction to None"
            )
        weights = truncated_weights(
            proximal, rollout_logprobs, loss_mask, config=config.rollout_correction
        )
        token_losses = weights * token_losses
        at_cap = weights >= config.rollout_correction.cap
        metrics["correction/weight/mean"] = share(weights, loss_mask, counts.num_tokens)
        metrics["correction/at_cap/fraction"] = share(at_cap, loss_mask, counts.num_tokens)

    loss = aggregate(
        token_losses, loss_mask, sequences, aggregation=config.aggregation, counts=counts
    )
    metrics["loss/policy/mean"] = loss.detach()

    kl = _kl_config(config)
    if kl is not None:
        if ref_logprobs is None:
            raise ValueError(
                "policy_loss: kl is set and needs ref_logprobs, got None; compute them under the "
                "reference policy, or set kl to None"
            )
        token_kl = kl_penalty(policy, ref_logprobs, config=kl)
        kl_loss = kl.coefficient * aggregate(
            token_kl, loss_mask, sequences, aggregation=config.aggregation, counts=counts
        )
        metrics["kl/ref/mean"] = share(token_kl, loss_mask, counts.num_tokens)
        metrics["loss/kl/mean"] = kl_loss.detach()
        loss = loss + kl_loss
    elif ref_logprobs is not None:
        raise ValueError(
            f"policy_loss: ref_logprobs are given, and this {type(config).__name__} has no KL term "
            "that would read them; set kl=KlPenalty(coefficient=...), which DapoLoss does not "
            "have, or leave them out"
        )
    return LossShare(loss=loss, metrics=metrics)


def _surrogate_losses(
    policy: Float[Tensor, "*layout"],
    proximal: Float[Tensor, "*layout"],
    advantages: Float[Tensor, " sequences"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    config: PolicyLoss,
    counts: BatchCounts,
) -> tuple[Float[Tensor, "*layout"], dict[str, Float[Tensor, ""]]]:
    """Per-token losses, and the metrics of their ratios."""
    surrogate: Surrogate
    match config:
        case GspoLoss():
            surrogate = gspo_sequence_losses(
                policy, proximal, advantages, loss_mask, sequences, config=config
            )
            live = sequences.sum(loss_mask.to(policy.dtype)) > 0
            metrics = surrogate_metrics(surrogate, live, counts.num_sequences)
            return sequences.spread(surrogate.losses), metrics
        case GrpoLoss():
            token_advantages = sequences.spread(advantages)
            surrogate = grpo_token_losses(
                policy, proximal, token_advantages, loss_mask, config=config
            )
        case DapoLoss():
            token_advantages = sequences.spread(advantages)
            surrogate = dapo_token_losses(
                policy, proximal, token_advantages, loss_mask, config=config
            )
        case _:
            assert_never(config)
    return surrogate.losses, surrogate_metrics(surrogate, loss_mask, counts.num_tokens)


def _kl_config(config: PolicyLoss) -> KlPenalty | None:
    match config:
        case GrpoLoss() | GspoLoss():
            return config.kl
        case DapoLoss():
            return None
        case _:
            assert_never(config)


def _check_shapes(sequences: Sequences, advantages: Tensor, **per_token: Tensor | None) -> None:
    """Reads shapes only. Without it, broadcasting would turn a wrong shape into a wrong number."""
    for name, tensor in per_token.items():
        if tensor is not None and tuple(tensor.shape) != sequences.shape:
            raise ValueError(
                f"policy_loss: expected {name} of shape {sequences.shape}, the layout of "
                f"`sequences`, got {tuple(tensor.shape)}"
            )
    if tuple(advantages.shape) != (sequences.num_sequences,):
        raise ValueError(
            f"policy_loss: expected advantages of shape ({sequences.num_sequences},), one per "
            f"sequence, got {tuple(advantages.shape)}"
        )
