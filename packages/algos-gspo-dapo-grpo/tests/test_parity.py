"""Ours against what the published verl and TRL computed from the same inputs.

``data/parity.json`` says which versions, and was written by the command that it names; differences
that are ours by choice are listed in docs/papers.md of the repository.
"""

import json
from pathlib import Path
from typing import Any, get_args

import attrs
import pytest
import torch
from torch import Tensor

from algos_gspo_dapo_grpo import (
    AdaptiveKlCoefficient,
    Bypass,
    CispoLoss,
    ClipCovLoss,
    DppoKlLoss,
    DppoTvLoss,
    DrGrpoAdvantages,
    FixedNormaliser,
    Gae,
    GdpoAdvantages,
    GmpoLoss,
    GpgAdvantages,
    GpgLoss,
    GroupAdvantages,
    GrpoAdvantages,
    GrpoLoss,
    GspoLoss,
    GspoTokenLoss,
    ImportanceWeighting,
    KlCovLoss,
    KlPenalty,
    PolicyLoss,
    RatioBand,
    ReinforcePlusPlusAdvantages,
    Rejection,
    RlooAdvantages,
    SapoLoss,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    Sequences,
    SequenceTruncation,
    TokenMean,
    TokenTruncation,
    WeightMasking,
    clip_cov_selection,
    correction_weights,
    count_batch,
    gae,
    gdpo_advantages,
    group_advantages,
    kept_mask,
    kl_cov_selection,
    kl_estimate,
    kl_penalty,
    next_kl_coefficient,
    opo_advantages,
    policy_loss,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    reward_to_go,
    whitened,
)

DATA = json.loads((Path(__file__).parent / "data" / "parity.json").read_text(encoding="utf-8"))
SEQUENCES = Sequences.padded(batch=6, time=7)

TRUNCATED, MASKED = TokenTruncation(cap=1.3), WeightMasking(low=0.7, high=1.3)
VERL = GrpoLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0, aggregation=TokenMean())
TRL = attrs.evolve(VERL, dual_clip=None)
NORMALISED = FixedNormaliser(normaliser=7.0)
VERL_LOSSES: dict[str, list[PolicyLoss]] = {
    "clipped token-mean": [VERL],
    "clipped seq-mean-token-mean": [attrs.evolve(VERL, aggregation=SequenceMeanTokenMean())],
    "clipped seq-mean-token-sum": [attrs.evolve(VERL, aggregation=SequenceMeanTokenSum())],
    "clipped seq-mean-token-sum-norm": [attrs.evolve(VERL, aggregation=NORMALISED)],
    "clipped bypass": [attrs.evolve(VERL, rollout_correction=Bypass())],
    "clipped with weights token truncated": [attrs.evolve(VERL, rollout_correction=TRUNCATED)],
    "clipped with weights token masked": [attrs.evolve(VERL, rollout_correction=MASKED)],
    "gspo": [
        GspoLoss(clip_low=0.05, clip_high=0.06),
        GspoTokenLoss(clip_low=0.05, clip_high=0.06),
    ],
    "sapo": [SapoLoss()],
    "gpg": [GpgLoss()],
    "cispo": [CispoLoss(clip_low=0.2, clip_high=0.28)],
    "gmpo": [GmpoLoss(clip_low=0.2, clip_high=0.3)],
    "dppo_tv": [DppoTvLoss(threshold_low=0.05, threshold_high=0.06)],
    "dppo_kl": [DppoKlLoss(threshold_low=0.01, threshold_high=0.02)],
    "clip_cov": [ClipCovLoss(clip_high=0.28, fraction=0.99, covariance_low=0.1)],
    "kl_cov": [KlCovLoss(fraction=0.2, coefficient=0.5)],
}
TRL_LOSSES: dict[str, list[PolicyLoss]] = {
    "clipped seq-mean-token-mean": [attrs.evolve(TRL, aggregation=SequenceMeanTokenMean())],
    "clipped token-mean": [TRL],
    "clipped seq-mean-token-sum-norm": [attrs.evolve(TRL, aggregation=NORMALISED)],
    "clipped with kl": [
        attrs.evolve(TRL, aggregation=SequenceMeanTokenMean(), kl=KlPenalty(coefficient=0.04))
    ],
    "sapo": [SapoLoss()],
    "cispo one-sided": [CispoLoss(clip_high=0.2)],
    "gspo": [GspoLoss(clip_low=0.05, clip_high=0.06)],
}
LOSSES = {"verl": VERL_LOSSES, "trl": TRL_LOSSES}
BY_GROUP: dict[str, GroupAdvantages] = {
    "advantages grpo": GrpoAdvantages(),
    "advantages dr_grpo": DrGrpoAdvantages(),
    "advantages rloo": RlooAdvantages(),
    "advantages rloo vectorized": RlooAdvantages(),
    "advantages gpg": GpgAdvantages(),
}
WEIGHTS: dict[str, ImportanceWeighting] = {
    "weights token truncated": TRUNCATED,
    "weights sequence truncated": SequenceTruncation(cap=1.3),
    "weights token masked": MASKED,
    "weights sequence masked": WeightMasking(level="sequence", low=0.5, high=2.0),
}
REJECTIONS = {
    "rejection token": RatioBand(level="token", low=1 / 1.4, high=1.4),
    "rejection sequence": RatioBand(level="sequence", low=1 / 1.7, high=1.7),
    "rejection geometric": RatioBand(level="geometric", low=1 / 1.1, high=1.1),
}


def largest_difference(case: dict[str, Any], inputs: dict[str, Any], *, dtype: str) -> float:
    """Largest absolute difference between ours and theirs, of value and gradient."""
    at = {
        name: torch.tensor(value, dtype=None if name in ("mask", "groups") else _dtype(dtype))
        for name, value in inputs.items()
    }
    name = case["name"]
    value = torch.tensor(case["value"], dtype=torch.float64)
    worst = 0.0
    if "gradient" in case:
        gradient = torch.tensor(case["gradient"], dtype=torch.float64)
        for our_value, our_gradient in _losses(case["source"], name, at):
            worst = max(worst, _distance(our_value, value), _distance(our_gradient, gradient))
    else:
        worst = _distance(_values(name, at), value)
    return worst


def _dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "float64": torch.float64}[name]


def _distance(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return (ours.detach().double() - theirs).abs().nan_to_num(nan=torch.inf).max().item()


def _losses(source: str, name: str, at: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    results = []
    if name.startswith("kl "):
        policy = at["policy"].clone().requires_grad_()
        estimator = name.removeprefix("kl ")
        if estimator == "k1":
            values = kl_estimate(policy, at["ref"], estimator="k1")
        else:
            penalty = KlPenalty(coefficient=1.0, estimator=estimator)  # type: ignore[arg-type]
            values = kl_penalty(policy, at["ref"], config=penalty)
        total = values[at["mask"]].sum()
        return [(total, torch.autograd.grad(total, policy)[0])]
    for config in LOSSES[source][name]:
        policy = at["policy"].clone().requires_grad_()
        bypass = isinstance(config.rollout_correction, Bypass)
        corrected = config.rollout_correction is not None
        total = policy_loss(
            policy,
            proximal_logprobs=None if bypass else at["proximal"],
            advantages=at["advantages"],
            loss_mask=at["mask"],
            sequences=SEQUENCES,
            config=config,
            counts=count_batch(at["mask"], SEQUENCES),
            rollout_logprobs=at["rollout"] if corrected else None,
            ref_logprobs=at["ref"] if name == "clipped with kl" else None,
            selected_tokens=_selected(config, at),
        ).loss
        results.append((total, torch.autograd.grad(total, policy)[0]))
    return results


def _selected(config: PolicyLoss, at: dict[str, Tensor]) -> Tensor | None:
    if isinstance(config, ClipCovLoss):
        return clip_cov_selection(
            at["policy"],
            at["proximal"],
            at["advantages"],
            at["mask"],
            SEQUENCES,
            config=config,
            generator=torch.Generator(),
        )
    if isinstance(config, KlCovLoss):
        return kl_cov_selection(
            at["policy"], at["advantages"], at["mask"], SEQUENCES, config=config
        )
    return None


def _values(name: str, at: dict[str, Tensor]) -> Tensor:  # noqa: C901, PLR0911  # one case each
    mask, rewards, groups = at["mask"], at["rewards"], at["groups"]
    num_tokens = mask.sum(1)
    if name in WEIGHTS:
        weights, *_ = correction_weights(
            at["proximal"], at["rollout"], mask, SEQUENCES, config=WEIGHTS[name]
        )
        return torch.where(mask, weights, 0.0)
    if name in REJECTIONS:
        rejection = Rejection(band=REJECTIONS[name])
        return kept_mask(at["proximal"], at["rollout"], mask, SEQUENCES, config=rejection)
    if name in BY_GROUP:
        return group_advantages(rewards, groups, config=BY_GROUP[name])
    match name:
        case "adaptive coefficient":
            adaptive = AdaptiveKlCoefficient(initial=0.1, target=2.0, horizon=100.0)
            coefficient = next_kl_coefficient(0.1, 2.2, num_samples=50, config=adaptive)
            return torch.tensor(coefficient, dtype=torch.float64)
        case "advantages opo":
            return opo_advantages(rewards, groups, num_tokens)
        case "advantages reinforce++ baseline":
            return reinforce_plus_plus_baseline_advantages(rewards, groups, num_tokens)
        case "advantages remax":
            return remax_advantages(rewards, at["greedy_rewards"])
        case "advantages gdpo":
            weighted = GdpoAdvantages(weights=(1.0, 0.5))
            return gdpo_advantages(
                at["more_rewards"], groups, config=weighted, num_tokens=num_tokens
            )
        case "advantages reinforce++":
            discounted = ReinforcePlusPlusAdvantages(discount=0.9)
            return reinforce_plus_plus_advantages(
                at["token_rewards"], mask, SEQUENCES, config=discounted
            )
        case "returns":
            return reward_to_go(at["token_rewards"], mask, SEQUENCES, discount=0.9)
    estimate = gae(
        at["token_rewards"],
        at["values"],
        mask,
        SEQUENCES,
        config=Gae(discount=0.9, trace=0.8),
    )
    if name == "gae returns":
        return estimate.returns
    assert name == "gae"
    return whitened(estimate.advantages, mask.to(estimate.advantages.dtype))


@pytest.mark.parametrize(
    "case", DATA["cases"], ids=[f"{case['source']} {case['name']}" for case in DATA["cases"]]
)
def test_values_and_gradients_are_theirs(case: dict[str, Any]) -> None:
    """To 1e-6 in float64, on a batch with padding, a tool call, and groups of three."""
    tolerance = max(1e-6, case.get("tolerance", 0.0))
    assert largest_difference(case, DATA["inputs"], dtype="float64") <= tolerance


@pytest.mark.parametrize(
    "case", DATA["cases"], ids=[f"{case['source']} {case['name']}" for case in DATA["cases"]]
)
def test_float32_is_close_to_their_float64(case: dict[str, Any]) -> None:
    """To 1e-5 with all inputs rounded to float32."""
    assert largest_difference(case, DATA["inputs"], dtype="float32") <= 1e-5


def test_every_loss_that_the_others_have_is_compared() -> None:
    """A new member of the union is compared, or stands here with the reason."""
    compared = {
        type(config) for cases in LOSSES.values() for row in cases.values() for config in row
    }
    # DAPO's and decoupled PPO's formula is the clipped surrogate that is compared as GrpoLoss
    # (test_policy_loss, test_decoupled_ppo); neither verl nor TRL has TOPR.
    missing = {member.__name__ for member in get_args(PolicyLoss)} - {c.__name__ for c in compared}
    assert missing == {"DapoLoss", "DecoupledPpoLoss", "ToprLoss"}
    names = {(case["source"], case["name"]) for case in DATA["cases"]}
    assert {(source, name) for source, cases in LOSSES.items() for name in cases} <= names


@pytest.mark.parametrize("source", ["verl", "trl"])
def test_what_bounds_a_loss_acts_on_these_inputs(source: str) -> None:
    """Agreement would mean little if no token were clipped, left out or selected."""
    at = {
        name: torch.tensor(value, dtype=None if name in ("mask", "groups") else torch.float64)
        for name, value in DATA["inputs"].items()
    }
    for name, configs in LOSSES[source].items():
        for config in configs:
            bypass = isinstance(config.rollout_correction, Bypass)
            share = policy_loss(
                at["policy"],
                proximal_logprobs=None if bypass else at["proximal"],
                advantages=at["advantages"],
                loss_mask=at["mask"],
                sequences=SEQUENCES,
                config=config,
                counts=count_batch(at["mask"], SEQUENCES),
                rollout_logprobs=at["rollout"] if config.rollout_correction is not None else None,
                ref_logprobs=at["ref"] if name == "clipped with kl" else None,
                selected_tokens=_selected(config, at),
            )
            clipped = share.metrics["ratio/clipped/fraction"].item()
            if isinstance(config, SapoLoss | GpgLoss | KlCovLoss):
                assert clipped == 0.0
            else:
                assert 0.05 < clipped < 0.7, name
