"""The formula that a configuration will run, term by term, with its numbers."""

from typing import assert_never

from algos_gspo_dapo_grpo.aggregation import (
    Aggregation,
    FixedNormaliser,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    TokenMean,
)
from algos_gspo_dapo_grpo.dapo import DapoLoss
from algos_gspo_dapo_grpo.grpo import GrpoLoss
from algos_gspo_dapo_grpo.gspo import GspoLoss
from algos_gspo_dapo_grpo.kl import K3_CAP, KlPenalty
from algos_gspo_dapo_grpo.policy_loss import PolicyLoss
from algos_gspo_dapo_grpo.surrogate import LOG_RATIO_CAP


def describe(config: PolicyLoss) -> str:
    """Write out what `policy_loss` computes under `config`.

    Sequences are i, tokens in the loss mask are t; N_tokens and N_sequences are the batch's
    counts, |i| the tokens of sequence i.
    """
    kl: KlPenalty | None
    match config:
        case GrpoLoss():
            title, ratio, unit = "GRPO (arXiv:2402.03300, eq. 3)", _TOKEN_RATIO, "it"
            kl, dual_clip = config.kl, config.dual_clip
        case DapoLoss():
            title, ratio, unit = "DAPO (arXiv:2503.14476, eq. 8)", _TOKEN_RATIO, "it"
            kl, dual_clip = None, None
        case GspoLoss():
            title, ratio, unit = "GSPO (arXiv:2507.18071, eq. 5)", _SEQUENCE_RATIO, "i"
            kl, dual_clip = config.kl, None
        case _:
            assert_never(config)

    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    term = f"l_{unit}" if config.rollout_correction is None else f"w_it * l_{unit}"
    if kl is not None:
        term = f"({term} + {kl.coefficient:g} * k_it)"
    lines = [
        f"{title}, minimised, as shares that add up:",
        f"  loss   = {_weighted_sum(config.aggregation, term)}",
        f"  l_{unit:<4} = -min(r_{unit} * A_i, clip(r_{unit}, {low:g}, {high:g}) * A_i)",
    ]
    if dual_clip is not None:
        lines.append(f"           and at most {dual_clip:g} * |A_i| where A_i < 0")
    lines.append(
        f"  r_{unit:<4} = {ratio}, exponent held in [-{LOG_RATIO_CAP:g}, {LOG_RATIO_CAP:g}]"
    )
    if config.rollout_correction is not None:
        cap = config.rollout_correction.cap
        lines.append(
            f"  w_it   = min(exp(proximal_it - rollout_it), {cap:g}), no gradient; "
            "1 where rollout_it is not finite"
        )
    if kl is not None:
        lines.append(f"  k_it   = {_kl_formula(kl)}")
    return "\n".join(lines)


_TOKEN_RATIO = "exp(policy_it - proximal_it)"  # noqa: S105  # a formula
_SEQUENCE_RATIO = "exp(sum_t (policy_it - proximal_it) / |i|)"


def _weighted_sum(aggregation: Aggregation, term: str) -> str:
    match aggregation:
        case TokenMean():
            return f"sum_i sum_t {term} / N_tokens"
        case SequenceMeanTokenMean():
            return f"sum_i (sum_t {term} / |i|) / N_sequences"
        case SequenceMeanTokenSum():
            return f"sum_i sum_t {term} / N_sequences"
        case FixedNormaliser(normaliser=normaliser):
            return f"sum_i sum_t {term} / (N_sequences * {normaliser:g})"
        case _:
            assert_never(aggregation)


def _kl_formula(kl: KlPenalty) -> str:
    match kl.estimator:
        case "k2":
            return "(policy_it - ref_it)^2 / 2"
        case "k3":
            return f"exp(d) - d - 1 with d = ref_it - policy_it, at most {K3_CAP:g}"
        case _:
            assert_never(kl.estimator)
