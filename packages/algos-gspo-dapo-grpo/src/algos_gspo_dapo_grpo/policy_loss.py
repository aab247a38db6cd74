"""One call for training loops: from log-probabilities to this micro-batch's share of the loss."""

from typing import NamedTuple, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.aggregation import BatchCounts, aggregate, aggregate_sequences
from algos_gspo_dapo_grpo.cispo import CispoLoss, cispo_token_losses
from algos_gspo_dapo_grpo.dapo import DapoLoss, dapo_token_losses
from algos_gspo_dapo_grpo.decoupled_ppo import DecoupledPpoLoss, decoupled_ppo_token_losses
from algos_gspo_dapo_grpo.diagnostics import (
    correction_metrics,
    mismatch_metrics,
    share,
    surrogate_metrics,
)
from algos_gspo_dapo_grpo.dppo import DppoKlLoss, DppoTvLoss, dppo_token_losses
from algos_gspo_dapo_grpo.entropy_control import (
    ClipCovLoss,
    KlCovLoss,
    clip_cov_token_losses,
    kl_cov_token_losses,
)
from algos_gspo_dapo_grpo.gmpo import GmpoLoss, gmpo_sequence_losses
from algos_gspo_dapo_grpo.gpg import GpgLoss, gpg_token_losses
from algos_gspo_dapo_grpo.grpo import GrpoLoss, grpo_token_losses
from algos_gspo_dapo_grpo.gspo import GspoLoss, gspo_sequence_losses
from algos_gspo_dapo_grpo.gspo_token import GspoTokenLoss, gspo_token_losses
from algos_gspo_dapo_grpo.kl import kl_penalty
from algos_gspo_dapo_grpo.precision import at_least_float32
from algos_gspo_dapo_grpo.rollout_correction import Bypass, CorrectionWeights, correction_weights
from algos_gspo_dapo_grpo.sapo import SapoLoss, sapo_token_losses
from algos_gspo_dapo_grpo.sequences import Sequences
from algos_gspo_dapo_grpo.surrogate import Surrogate
from algos_gspo_dapo_grpo.token_advantages import TokenAdvantages, per_token
from algos_gspo_dapo_grpo.topr import ToprLoss, topr_token_losses

PolicyLoss = (
    GrpoLoss
    | DapoLoss
    | GspoLoss
    | GspoTokenLoss
    | CispoLoss
    | SapoLoss
    | GmpoLoss
    | DppoTvLoss
    | DppoKlLoss
    | ClipCovLoss
    | KlCovLoss
    | GpgLoss
    | DecoupledPpoLoss
    | ToprLoss
)
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
    advantages: Float[Tensor, " sequences"] | TokenAdvantages,
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    config: PolicyLoss,
    counts: BatchCounts,
    rollout_logprobs: Float[Tensor, "*layout"] | None = None,
    ref_logprobs: Float[Tensor, "*layout"] | None = None,
    selected_tokens: Bool[Tensor, "*layout"] | None = None,
) -> LossShare:
    """Compute the loss that `config` names, for one micro-batch of any layout.

    Args:
        policy_logprobs: log-probability of each token under the weights in training, in nats; the
            only input that carries a gradient. What stands outside the mask is ignored.
        proximal_logprobs: the same under the weights at the start of the step. None says that
            these are the weights in training, as in the only optimizer step on a batch: the
            ratio is then 1 and its gradient that of `policy_logprobs`. Under `Bypass` it is None:
            the sampler's take this place.
        advantages: one per sequence, in reward units; or `TokenAdvantages`, which losses with a
            ratio per sequence (GSPO, GMPO, TOPR) refuse.
        loss_mask: True on the sampled tokens that count.
        sequences: boundaries of the sequences; each is whole in this micro-batch.
        config: the loss and its numbers.
        counts: sizes of everything that this optimizer step looks at; see `BatchCounts`.
        rollout_logprobs: what the sampler reported, in nats, NaN or infinite where
            it reported nothing.
            Needed by a rollout correction; if given, the mismatch metrics are returned too.
        ref_logprobs: under a frozen reference, in nats. Needed by a KL term, refused without.
        selected_tokens: chosen by `clip_cov_selection` or `kl_cov_selection` over the whole
            batch. Needed by `ClipCovLoss` and `KlCovLoss`, refused by the others.

    Returns:
        Shares of the loss and of the metrics, to be added up over micro-batches and ranks:
        ``loss/policy/mean``; ``ratio/...`` (over tokens; for GSPO and GMPO's ratio over
        sequences);
        ``mismatch/...`` with `rollout_logprobs`; ``correction/...`` with a rollout correction;
        with a KL term ``kl/ref/mean`` (nats, over tokens) and ``loss/kl/mean`` (as added to the
        loss, with its coefficient).

    Raises:
        ValueError: if a shape, dtype or device does not fit `sequences`, or a tensor that the
            configuration needs is missing, or one is given that it cannot use.
    """
    _check_tensors(
        sequences,
        advantages,
        policy_logprobs=policy_logprobs,
        proximal_logprobs=proximal_logprobs,
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        ref_logprobs=ref_logprobs,
        selected_tokens=selected_tokens,
    )
    # Masked once, first: whatever a later term makes of places outside, no gradient gets past here.
    policy = torch.where(loss_mask, at_least_float32(policy_logprobs), 0.0)
    proximal, recomputed = _proximal(
        policy, proximal_logprobs, rollout_logprobs, loss_mask, config=config
    )
    surrogate = _surrogate(
        policy,
        proximal,
        _data(advantages, policy.dtype),
        loss_mask,
        sequences,
        config=config,
        selected_tokens=selected_tokens,
    )
    metrics = _surrogate_metrics(surrogate, loss_mask, sequences, config=config, counts=counts)

    weighting: CorrectionWeights | None = None
    correction = config.rollout_correction
    if rollout_logprobs is not None:
        metrics |= mismatch_metrics(recomputed, rollout_logprobs, loss_mask, counts=counts)
        if correction is not None and not isinstance(correction, Bypass):
            weighting = correction_weights(
                recomputed, rollout_logprobs, loss_mask, sequences, config=correction
            )
            metrics |= correction_metrics(weighting, loss_mask, config=correction, counts=counts)

    loss = _aggregated(
        surrogate.losses, weighting, loss_mask, sequences, config=config, counts=counts
    )
    metrics["loss/policy/mean"] = loss.detach()

    kl = None if isinstance(config, DapoLoss) else config.kl
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


def _proximal(
    policy: Tensor,
    proximal_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    loss_mask: Tensor,
    *,
    config: PolicyLoss,
) -> tuple[Tensor, Tensor]:
    """What the ratio is taken against, and the trainer's own, that the sampler is compared with."""
    if config.rollout_correction is not None and rollout_logprobs is None:
        raise ValueError(
            "policy_loss: rollout_correction is set and needs rollout_logprobs, got None; give "
            "the sampler's log-probabilities, or set rollout_correction to None"
        )
    recomputed = policy.detach() if proximal_logprobs is None else proximal_logprobs
    if isinstance(config.rollout_correction, Bypass) and rollout_logprobs is not None:
        if proximal_logprobs is not None:
            raise ValueError(
                "policy_loss: proximal_logprobs are given, and rollout_correction is Bypass, which "
                "takes the ratio against rollout_logprobs and would ignore them; give None, or "
                "correct with TokenTruncation, SequenceTruncation or WeightMasking"
            )
        known = loss_mask & torch.isfinite(rollout_logprobs)
        rollout = at_least_float32(rollout_logprobs).to(policy.dtype)
        return torch.where(known, rollout, recomputed), recomputed
    return recomputed, recomputed


def _data(advantages: Tensor | TokenAdvantages, dtype: torch.dtype) -> Tensor | TokenAdvantages:
    """Advantages in the dtype of the formula, without a gradient."""
    if isinstance(advantages, TokenAdvantages):
        return TokenAdvantages(values=advantages.values.detach().to(dtype))
    return advantages.detach().to(dtype)


def _of_sequences(advantages: Tensor | TokenAdvantages, config: PolicyLoss) -> Tensor:
    if isinstance(advantages, TokenAdvantages):
        raise ValueError(  # noqa: TRY004  # the type is accepted, this combination is not
            f"policy_loss: {type(config).__name__} has one ratio per sequence and takes one "
            "advantage per sequence, got TokenAdvantages; GspoTokenLoss has the sequence's ratio "
            "with an advantage for each token"
        )
    return advantages


def _selected(selected_tokens: Tensor | None, config: PolicyLoss) -> Tensor:
    if selected_tokens is None:
        chooser = "clip_cov_selection" if isinstance(config, ClipCovLoss) else "kl_cov_selection"
        raise ValueError(
            f"policy_loss: {type(config).__name__} needs selected_tokens, got None; choose them "
            f"over the whole batch with {chooser}"
        )
    return selected_tokens


def _surrogate(
    policy: Tensor,
    proximal: Tensor,
    advantages: Tensor | TokenAdvantages,
    loss_mask: Tensor,
    sequences: Sequences,
    *,
    config: PolicyLoss,
    selected_tokens: Tensor | None,
) -> Surrogate:
    """Losses per token; for GSPO and GMPO, whose loss is the sequence's, per sequence."""
    if selected_tokens is not None and not isinstance(config, ClipCovLoss | KlCovLoss):
        raise ValueError(
            f"policy_loss: selected_tokens are given, and {type(config).__name__} has no use for "
            "them; ClipCovLoss and KlCovLoss have"
        )
    match config:
        case GspoLoss():
            of_sequences = _of_sequences(advantages, config)
            return gspo_sequence_losses(
                policy, proximal, of_sequences, loss_mask, sequences, config=config
            )
        case GmpoLoss():
            of_sequences = _of_sequences(advantages, config)
            return gmpo_sequence_losses(
                policy, proximal, of_sequences, loss_mask, sequences, config=config
            )
        case ToprLoss():
            of_sequences = _of_sequences(advantages, config)
            return topr_token_losses(
                policy, proximal, of_sequences, loss_mask, sequences, config=config
            )
        case _:
            return _token_surrogate(
                policy,
                proximal,
                per_token(advantages, sequences),
                loss_mask,
                sequences,
                config=config,
                selected_tokens=selected_tokens,
            )


def _aggregated(
    losses: Tensor,
    weighting: CorrectionWeights | None,
    loss_mask: Tensor,
    sequences: Sequences,
    *,
    config: PolicyLoss,
    counts: BatchCounts,
) -> Tensor:
    """The share of losses per token or per sequence, times the weights of a rollout correction."""
    aggregation = config.aggregation
    if not isinstance(config, GspoLoss | GmpoLoss):
        weighted = losses if weighting is None else weighting.weights * losses
        return aggregate(weighted, loss_mask, sequences, aggregation=aggregation, counts=counts)
    token_weights = None
    if weighting is not None and weighting.of_sequences is not None:
        losses = weighting.of_sequences * losses
    elif weighting is not None:
        token_weights = weighting.weights
    return aggregate_sequences(
        losses,
        loss_mask,
        sequences,
        aggregation=aggregation,
        counts=counts,
        token_weights=token_weights,
    )


def _surrogate_metrics(
    surrogate: Surrogate,
    loss_mask: Tensor,
    sequences: Sequences,
    *,
    config: PolicyLoss,
    counts: BatchCounts,
) -> dict[str, Tensor]:
    """Shares over the units that ratios and clips belong to."""
    if not isinstance(config, GspoLoss | GmpoLoss):
        return surrogate_metrics(surrogate, loss_mask, counts.num_tokens)
    live = sequences.sum(loss_mask.to(surrogate.ratios.dtype)) > 0
    if isinstance(config, GspoLoss):
        return surrogate_metrics(surrogate, live, counts.num_sequences)
    return {
        "ratio/importance/mean": share(surrogate.ratios, live, counts.num_sequences),
        "ratio/clipped/fraction": share(surrogate.clipped, loss_mask, counts.num_tokens),
    }


def _token_surrogate(  # noqa: C901, PLR0911  # one case and one return per loss
    policy: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sequences: Sequences,
    *,
    config: GrpoLoss
    | DapoLoss
    | GspoTokenLoss
    | CispoLoss
    | SapoLoss
    | DppoTvLoss
    | DppoKlLoss
    | ClipCovLoss
    | KlCovLoss
    | GpgLoss
    | DecoupledPpoLoss,
    selected_tokens: Tensor | None,
) -> Surrogate:
    """Losses that take an advantage per token."""
    tensors = (policy, proximal, advantages, loss_mask)
    match config:
        case GrpoLoss():
            return grpo_token_losses(*tensors, config=config)
        case DapoLoss():
            return dapo_token_losses(*tensors, config=config)
        case GspoTokenLoss():
            return gspo_token_losses(*tensors, sequences, config=config)
        case CispoLoss():
            return cispo_token_losses(*tensors, config=config)
        case SapoLoss():
            return sapo_token_losses(*tensors, config=config)
        case DppoTvLoss() | DppoKlLoss():
            return dppo_token_losses(*tensors, config=config)
        case ClipCovLoss():
            selected = _selected(selected_tokens, config)
            return clip_cov_token_losses(*tensors, selected, config=config)
        case KlCovLoss():
            selected = _selected(selected_tokens, config)
            return kl_cov_token_losses(*tensors, selected, config=config)
        case GpgLoss():
            return gpg_token_losses(*tensors, config=config)
        case DecoupledPpoLoss():
            return decoupled_ppo_token_losses(*tensors, config=config)
        case _:
            assert_never(config)


def _check_tensors(
    sequences: Sequences,
    advantages: Tensor | TokenAdvantages,
    **per_token: Tensor | None,
) -> None:
    """Reads no values. Without it, broadcasting would turn a wrong shape into a wrong number."""
    if isinstance(advantages, TokenAdvantages):
        per_token["advantages"] = advantages.values
    elif tuple(advantages.shape) != (sequences.num_sequences,):
        raise ValueError(
            f"policy_loss: expected advantages of shape ({sequences.num_sequences},), one per "
            f"sequence, got {tuple(advantages.shape)}; advantages per token are given as "
            "TokenAdvantages"
        )
    for name, tensor in per_token.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != sequences.shape:
            raise ValueError(
                f"policy_loss: expected {name} of shape {sequences.shape}, the layout of "
                f"`sequences`, got {tuple(tensor.shape)}"
            )
        if (tensor.dtype == torch.bool) != (name in {"loss_mask", "selected_tokens"}):
            kind = "torch.bool" if name in {"loss_mask", "selected_tokens"} else "a float dtype"
            raise ValueError(f"policy_loss: expected {name} of {kind}, got {tensor.dtype}")
        if tensor.device != sequences.sequence_ids.device:
            raise ValueError(
                f"policy_loss: expected {name} on {sequences.sequence_ids.device}, where "
                f"`sequences` is, got {tensor.device}"
            )
