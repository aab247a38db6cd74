"""The printed formula is the one that runs."""

from textwrap import dedent

import pytest

from algos_gspo_dapo_grpo import (
    DapoLoss,
    FixedNormaliser,
    GrpoLoss,
    GspoLoss,
    KlPenalty,
    PolicyLoss,
    TokenMean,
    TokenTruncation,
    describe,
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
