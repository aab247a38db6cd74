"""The formula that a configuration will run, term by term, with its numbers."""

from typing import NamedTuple, assert_never

from algos_gspo_dapo_grpo.advantages import DrGrpoAdvantages, GroupAdvantages, GrpoAdvantages
from algos_gspo_dapo_grpo.aggregation import (
    Aggregation,
    FixedNormaliser,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    TokenMean,
)
from algos_gspo_dapo_grpo.cispo import CispoLoss
from algos_gspo_dapo_grpo.dapo import DapoLoss
from algos_gspo_dapo_grpo.decoupled_ppo import DecoupledPpoLoss
from algos_gspo_dapo_grpo.dppo import DppoKlLoss, DppoTvLoss
from algos_gspo_dapo_grpo.entropy_control import ClipCovLoss, KlCovLoss
from algos_gspo_dapo_grpo.gmpo import GmpoLoss
from algos_gspo_dapo_grpo.gpg import GpgAdvantages, GpgLoss
from algos_gspo_dapo_grpo.grpo import GrpoLoss
from algos_gspo_dapo_grpo.gspo import GspoLoss
from algos_gspo_dapo_grpo.gspo_token import GspoTokenLoss
from algos_gspo_dapo_grpo.kl import K3_CAP, KlPenalty
from algos_gspo_dapo_grpo.maxrl import MaxRlAdvantages
from algos_gspo_dapo_grpo.policy_loss import PolicyLoss
from algos_gspo_dapo_grpo.rloo import RlooAdvantages
from algos_gspo_dapo_grpo.rollout_correction import (
    Bypass,
    ImportanceWeighting,
    RatioLevel,
    RolloutCorrection,
    SequenceTruncation,
    TokenTruncation,
    WeightMasking,
)
from algos_gspo_dapo_grpo.sapo import SapoLoss
from algos_gspo_dapo_grpo.surrogate import LOG_RATIO_CAP
from algos_gspo_dapo_grpo.topr import ToprLoss


def describe(config: PolicyLoss) -> str:
    """Write out what `policy_loss` computes under `config`.

    Sequences are i, tokens in the loss mask are t; N_tokens and N_sequences are the batch's
    counts, |i| the tokens of sequence i. sg(...) has no gradient. A_i is A_it where advantages
    are given per token.
    """
    formula = _formula(config)
    kl = None if isinstance(config, DapoLoss) else config.kl
    correction = config.rollout_correction
    weighted = correction is not None and not isinstance(correction, Bypass)
    unit = formula.unit
    term = f"w_it * l_{unit}" if weighted else f"l_{unit}"
    if kl is not None:
        term = f"({term} + {kl.coefficient:g} * k_it)"
    lines = [
        f"{formula.title}, minimised, as shares that add up:",
        f"  loss   = {_weighted_sum(config.aggregation, term)}",
        f"  l_{unit:<4} = {formula.loss[0]}",
        *(f"           {line}" for line in formula.loss[1:]),
        *(f"  {name:<6} = {text}" for name, text in formula.where),
        *_correction_lines(correction),
    ]
    if kl is not None:
        lines.append(f"  k_it   = {_kl_formula(kl)}")
    text = "\n".join(lines)
    return text.replace("proximal_it", "rollout_it") if isinstance(correction, Bypass) else text


def describe_advantages(config: GroupAdvantages) -> str:
    """Write out what `group_advantages` computes under `config`.

    Samples are i, R_i their rewards; mean and std are those of the scored samples of i's group.
    """
    match config:
        case GrpoAdvantages():
            divisor = f"({config.std} std + {config.epsilon:g})"
            return f"GRPO (arXiv:2402.03300, section 4.1.2): A_i = (R_i - mean) / {divisor}"
        case DrGrpoAdvantages():
            return "Dr.GRPO (arXiv:2503.20783, section 3.2): A_i = R_i - mean"
        case RlooAdvantages():
            return "RLOO (arXiv:2402.14740): A_i = R_i - mean of the others"
        case GpgAdvantages():
            return (
                f"GPG (arXiv:2504.02546): A_i = alpha * (R_i - mean) / {config.normaliser:g}, "
                "alpha = scored samples / those in groups with a spread"
            )
        case MaxRlAdvantages():
            return (
                "MaxRL (arXiv:2602.02710): "
                f"A_i = (R_i - mean) / (mean + {config.epsilon:g}), 0 unless mean > 0"
            )
        case _:
            assert_never(config)


class _Formula(NamedTuple):
    title: str
    unit: str  # what a loss belongs to: "it" or "i"
    loss: tuple[str, ...]
    where: tuple[tuple[str, str], ...]


def _formula(config: PolicyLoss) -> _Formula:  # noqa: C901, PLR0911, PLR0912  # one case per loss
    token_ratio: tuple[tuple[str, str], ...] = (("r_it", _held(_TOKEN_RATIO)),)
    ratio: tuple[tuple[str, str], ...]
    match config:
        case GrpoLoss():
            loss = _clipped("it", config.clip_low, config.clip_high)
            if config.dual_clip is not None:
                loss = (*loss, f"and at most {config.dual_clip:g} * |A_i| where A_i < 0")
            return _Formula("GRPO (arXiv:2402.03300, eq. 3)", "it", loss, token_ratio)
        case DapoLoss():
            loss = _clipped("it", config.clip_low, config.clip_high)
            return _Formula("DAPO (arXiv:2503.14476, eq. 8)", "it", loss, token_ratio)
        case GspoLoss():
            loss = _clipped("i", config.clip_low, config.clip_high)
            ratio = (("r_i", _held(_SEQUENCE_RATIO)),)
            return _Formula("GSPO (arXiv:2507.18071, eq. 5)", "i", loss, ratio)
        case GspoTokenLoss():
            loss = _clipped("it", config.clip_low, config.clip_high)
            ratio = (
                ("r_it", "sg(s_i) * exp(policy_it - sg(policy_it))"),
                ("s_i", _held(_SEQUENCE_RATIO)),
            )
            return _Formula("GSPO-token (arXiv:2507.18071, eq. 13)", "it", loss, ratio)
        case CispoLoss():
            lowest = 0.0 if config.clip_low is None else 1.0 - config.clip_low
            weight = f"sg(clip(r_it, {lowest:g}, {1.0 + config.clip_high:g}))"
            loss = (f"-{weight} * A_i * policy_it",)
            return _Formula("CISPO (arXiv:2506.13585, eq. 4)", "it", loss, token_ratio)
        case SapoLoss():
            loss = ("-(4 / tau) * sigmoid(tau * (r_it - 1)) * A_i",)
            positive, negative = config.temperature_positive, config.temperature_negative
            tau = ("tau", f"{positive:g} where A_i > 0, else {negative:g}")
            return _Formula("SAPO (arXiv:2511.20347)", "it", loss, (*token_ratio, tau))
        case GmpoLoss():
            low, high = -config.clip_low, config.clip_high
            held = f"at most {high:g} where A_i > 0, at least {low:g} where A_i < 0"
            ratio = (
                ("r_i", _held("exp(sum_t c_it / |i|)")),
                ("c_it", f"policy_it - proximal_it, {held}"),
            )
            return _Formula("GMPO (arXiv:2507.20673)", "i", ("-r_i * A_i",), ratio)
        case DppoTvLoss() | DppoKlLoss():
            total_variation = isinstance(config, DppoTvLoss)
            name = "DPPO-TV" if total_variation else "DPPO-KL"
            distance = (
                "|exp(policy_it) - exp(proximal_it)|"
                if total_variation
                else "KL of (token, any other), proximal_it against policy_it"
            )
            loss = (
                f"-sg(min(r_it, {config.max_ratio:g})) * A_i * policy_it,",
                f"0 where A_i > 0, the token rose and D_it > {config.threshold_high:g},",
                f"0 where A_i <= 0, the token fell and D_it > {config.threshold_low:g}",
            )
            where = (*token_ratio, ("D_it", distance))
            return _Formula(f"{name} (arXiv:2602.04879, section 5.4)", "it", loss, where)
        case ClipCovLoss():
            band = f"({config.covariance_low:g}, {config.covariance_high:g})"
            loss = (
                *_clipped("it", config.clip_low, config.clip_high),
                f"0 on {config.fraction:g} of all tokens, drawn of covariance in {band}",
            )
            return _Formula("Clip-Cov (arXiv:2505.22617)", "it", loss, token_ratio)
        case KlCovLoss():
            pull = f"and {config.coefficient:g} * |policy_it - proximal_it| more"
            where_pulled = f"on {config.fraction:g} of all tokens, of the largest covariance"
            loss = ("-r_it * A_i", pull, where_pulled)
            return _Formula("KL-Cov (arXiv:2505.22617)", "it", loss, token_ratio)
        case GpgLoss():
            return _Formula("GPG (arXiv:2504.02546)", "it", ("-A_i * policy_it",), ())
        case DecoupledPpoLoss():
            loss = _clipped("it", config.clip_low, config.clip_high)
            return _Formula("Decoupled PPO (arXiv:2505.24298)", "it", loss, token_ratio)
        case ToprLoss():
            loss = ("-A_i * policy_it where A_i >= 0, else -sg(min(r_i, 1)) * A_i * policy_it",)
            ratio = (("r_i", _held("exp(sum_t (policy_it - proximal_it))")),)
            return _Formula("TOPR (arXiv:2503.14286)", "it", loss, ratio)
        case _:
            assert_never(config)


def _clipped(unit: str, clip_low: float, clip_high: float) -> tuple[str, ...]:
    bounds = f"{1.0 - clip_low:g}, {1.0 + clip_high:g}"
    return (f"-min(r_{unit} * A_i, clip(r_{unit}, {bounds}) * A_i)",)


def _held(ratio: str) -> str:
    return f"{ratio}, exponent held in [-{LOG_RATIO_CAP:g}, {LOG_RATIO_CAP:g}]"


def _correction_lines(correction: RolloutCorrection | None) -> list[str]:
    match correction:
        case None:
            return []
        case Bypass():
            return ["  bypass: no proximal policy; where rollout_it is not finite the ratio is 1"]
        case _:
            return [f"  w_it   = {_weight(correction)}"]


def _weight(correction: ImportanceWeighting) -> str:
    level: RatioLevel = "token" if isinstance(correction, TokenTruncation) else correction.level
    ratio = {
        "token": "exp(proximal_it - rollout_it)",
        "sequence": "exp(sum_t (proximal_it - rollout_it))",
        "geometric": "exp(sum_t (proximal_it - rollout_it) / |i|)",
    }[level]
    gap = "1 where rollout_it is not finite"
    if level != "token":
        gap = "0 in the sum where rollout_it is not finite"
    match correction:
        case TokenTruncation() | SequenceTruncation():
            return f"min({ratio}, {correction.cap:g}), no gradient; {gap}"
        case WeightMasking():
            band = f"[{correction.low:g}, {correction.high:g}]"
            return f"{ratio}, 0 outside {band}, no gradient; {gap}"
        case _:
            assert_never(correction)


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
    straight_through = "; gradient policy_it - ref_it"
    k3 = f"exp(d) - d - 1 with d = ref_it - policy_it, at most {K3_CAP:g}"
    match kl.estimator:
        case "k2":
            return "(policy_it - ref_it)^2 / 2"
        case "k3":
            return k3
        case "abs":
            return "|policy_it - ref_it|"
        case "k1+":
            return f"policy_it - ref_it{straight_through}"
        case "k3+":
            return f"{k3}{straight_through}"
        case "abs+":
            return f"|policy_it - ref_it|{straight_through}"
        case _:
            assert_never(kl.estimator)
