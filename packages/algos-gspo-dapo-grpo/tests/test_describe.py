"""The printed formula is the one that runs."""

from pathlib import Path
from textwrap import dedent
from typing import get_args

import attrs
import pytest

from algos_gspo_dapo_grpo import (
    Bypass,
    CispoLoss,
    DapoLoss,
    DppoKlLoss,
    FixedNormaliser,
    GmpoLoss,
    GpgAdvantages,
    GroupAdvantages,
    GrpoAdvantages,
    GrpoLoss,
    GspoLoss,
    KlPenalty,
    MaxRlAdvantages,
    PolicyLoss,
    SapoLoss,
    SequenceTruncation,
    TokenMean,
    TokenTruncation,
    ToprLoss,
    WeightMasking,
    describe,
    describe_advantages,
)

EXPECTED: list[tuple[PolicyLoss, str]] = [
    (
        DapoLoss(),
        """\
        DAPO (arXiv:2503.14476, eq. 8), minimised, as shares that add up:
          loss   = sum_i sum_t l_it / N_tokens
          l_it   = -min(r_it * A_i, clip(r_it, 0.8, 1.28) * A_i)
          r_it   = exp(policy_it - proximal_it), exponent held in [-20, 20]""",
    ),
    (
        GrpoLoss(
            clip_high=0.25,
            dual_clip=3.0,
            aggregation=FixedNormaliser(normaliser=1024.0),
            kl=KlPenalty(coefficient=0.04),
            rollout_correction=TokenTruncation(cap=2.5),
        ),
        """\
        GRPO (arXiv:2402.03300, eq. 3), minimised, as shares that add up:
          loss   = sum_i sum_t (w_it * l_it + 0.04 * k_it) / (N_sequences * 1024)
          l_it   = -min(r_it * A_i, clip(r_it, 0.8, 1.25) * A_i)
                   and at most 3 * |A_i| where A_i < 0
          r_it   = exp(policy_it - proximal_it), exponent held in [-20, 20]
          w_it   = min(exp(proximal_it - rollout_it), 2.5), no gradient; 1 where rollout_it is not finite
          k_it   = exp(d) - d - 1 with d = ref_it - policy_it, at most 10""",  # noqa: E501
    ),
    (
        GspoLoss(kl=KlPenalty(coefficient=0.1, estimator="k2")),
        """\
        GSPO (arXiv:2507.18071, eq. 5), minimised, as shares that add up:
          loss   = sum_i (sum_t (l_i + 0.1 * k_it) / |i|) / N_sequences
          l_i    = -min(r_i * A_i, clip(r_i, 0.9997, 1.0004) * A_i)
          r_i    = exp(sum_t (policy_it - proximal_it) / |i|), exponent held in [-20, 20]
          k_it   = (policy_it - ref_it)^2 / 2""",
    ),
]


@pytest.mark.parametrize(("config", "text"), EXPECTED, ids=["dapo", "grpo", "gspo"])
def test_the_formula_is_printed_with_its_numbers(config: PolicyLoss, text: str) -> None:
    """Every term that runs is printed with its numbers, and no term that does not."""
    assert describe(config) == dedent(text)


WITH_EVERYTHING: dict[type[PolicyLoss], PolicyLoss] = {
    CispoLoss: CispoLoss(clip_low=0.2, rollout_correction=Bypass()),
    SapoLoss: SapoLoss(rollout_correction=WeightMasking()),
    GmpoLoss: GmpoLoss(rollout_correction=SequenceTruncation(level="geometric")),
    DppoKlLoss: DppoKlLoss(kl=KlPenalty(coefficient=0.1, estimator="k1+")),
    ToprLoss: ToprLoss(rollout_correction=Bypass()),
}


def test_every_description_is_the_committed_one() -> None:
    """Each member of both unions, printed; a changed default is a changed line in review."""
    texts = []
    for member in get_args(PolicyLoss):
        texts.append(describe(member()))
        if member in WITH_EVERYTHING:
            texts.append(describe(WITH_EVERYTHING[member]))
    texts += [describe_advantages(member()) for member in get_args(GroupAdvantages)]
    committed = (Path(__file__).parent / "data" / "describe.txt").read_text(encoding="utf-8")
    assert "\n\n".join(texts) + "\n" == committed


@pytest.mark.parametrize("member", get_args(PolicyLoss), ids=lambda member: member.kind)
def test_no_setting_of_a_loss_is_missing_from_its_description(member: type[PolicyLoss]) -> None:
    """Whatever is changed in a configuration changes what is printed."""
    config = member()
    others = {
        "aggregation": FixedNormaliser(normaliser=17.0),
        "kl": KlPenalty(coefficient=0.3),
        "rollout_correction": TokenTruncation(cap=3.0),
        "dual_clip": 3.0,
    }
    for field in attrs.fields(member):
        value = others.get(field.name)
        if value is None:
            value = 0.9 * (getattr(config, field.name) or 0.1)
        changed = attrs.evolve(config, **{field.name: value})  # type: ignore[arg-type]  # by name
        assert describe(changed) != describe(config), field.name


def test_a_bypass_names_the_policy_that_the_ratio_is_against() -> None:
    """No proximal policy appears in what is printed."""
    text = describe(GrpoLoss(rollout_correction=Bypass()))
    assert "exp(policy_it - rollout_it)" in text
    assert "proximal_it" not in text


def test_different_advantages_read_differently() -> None:
    """Settings of advantages are printed too."""
    texts = [
        describe_advantages(config)
        for config in (
            GrpoAdvantages(),
            GrpoAdvantages(std="population"),
            GrpoAdvantages(epsilon=1e-4),
            GpgAdvantages(),
            GpgAdvantages(normaliser=2.0),
            MaxRlAdvantages(),
            MaxRlAdvantages(epsilon=1e-4),
        )
    ]
    assert len(set(texts)) == len(texts)


def test_different_configurations_read_differently() -> None:
    """No setting is missing from the description."""
    texts = [
        describe(config)
        for config in (
            GrpoLoss(),
            GrpoLoss(clip_low=0.1),
            GrpoLoss(clip_high=0.1),
            GrpoLoss(dual_clip=3.0),
            GrpoLoss(dual_clip=4.0),
            GrpoLoss(aggregation=TokenMean()),
            GrpoLoss(kl=KlPenalty(coefficient=0.1)),
            GrpoLoss(kl=KlPenalty(coefficient=0.2)),
            GrpoLoss(kl=KlPenalty(coefficient=0.1, estimator="k2")),
            GrpoLoss(rollout_correction=TokenTruncation()),
            GrpoLoss(rollout_correction=TokenTruncation(cap=3.0)),
        )
    ]
    assert len(set(texts)) == len(texts)
