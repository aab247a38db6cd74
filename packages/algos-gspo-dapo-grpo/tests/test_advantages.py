"""Advantages of groups."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from algos_gspo_dapo_grpo import (
    DrGrpoAdvantages,
    GpgAdvantages,
    GroupAdvantages,
    GrpoAdvantages,
    MaxRlAdvantages,
    RlooAdvantages,
    dr_grpo_advantages,
    group_advantages,
    group_ids_of,
    grpo_advantages,
)

# No deadline: the machine may be busy, and no law here is about time.
LAW = settings(deadline=None, max_examples=25, derandomize=True)
SAMPLE, POPULATION = GrpoAdvantages(), GrpoAdvantages(std="population")
EVERY_KIND = pytest.mark.parametrize(
    "config",
    [
        SAMPLE,
        POPULATION,
        DrGrpoAdvantages(),
        RlooAdvantages(),
        GpgAdvantages(),
        MaxRlAdvantages(),
    ],
    ids=["sample", "population", "dr_grpo", "rloo", "gpg", "maxrl"],
)


def _one_group(rewards: list[float], config: GroupAdvantages = SAMPLE) -> list[float]:
    ids = torch.zeros(len(rewards), dtype=torch.int64)
    return group_advantages(torch.tensor(rewards), ids, config=config).tolist()


def test_grpo_divides_by_the_standard_deviation() -> None:
    """A02: rewards 1, 0, 0, 1 give +-0.866 with the sample, +-1 with the population deviation."""
    assert _one_group([1.0, 0.0, 0.0, 1.0]) == pytest.approx(
        [0.866, -0.866, -0.866, 0.866], abs=1e-4
    )
    assert _one_group([1.0, 0.0, 0.0, 1.0], POPULATION) == pytest.approx([1, -1, -1, 1], abs=1e-5)


def test_dr_grpo_only_centres() -> None:
    """Rewards 3 and 1 are 1 above and 1 below their mean."""
    ids = torch.tensor([0, 0])
    assert dr_grpo_advantages(torch.tensor([3.0, 1.0]), ids).tolist() == [1.0, -1.0]


@EVERY_KIND
def test_a_group_of_equal_rewards_gives_exactly_zero(config: GroupAdvantages) -> None:
    """A01, A03: no residue of the mean is divided by a deviation that should be 0."""
    assert _one_group([1.0] * 4, config) == [0.0] * 4
    for size in range(2, 20):
        assert _one_group([0.95] * size, config) == [0.0] * size
        ids = torch.zeros(size, dtype=torch.int64)
        doubles = torch.full((size,), 0.1, dtype=torch.float64)
        assert group_advantages(doubles, ids, config=config).tolist() == [0.0] * size


def test_one_outlier_among_equal_rewards_stays_bounded() -> None:
    """A03: 0 among seven 0.95 is (0 - 0.83125) / 0.33588 = -2.4749, the others 0.3536."""
    assert _one_group([0.0] + [0.95] * 7) == pytest.approx([-2.47487] + [0.353553] * 7, abs=1e-4)


@EVERY_KIND
def test_a_group_of_one_gives_zero(config: GroupAdvantages) -> None:
    """A01, A02: with nobody to compare with there is no advantage, and never the raw reward."""
    assert _one_group([7.0], config) == [0.0]


@pytest.mark.parametrize("unscorable", [math.nan, math.inf, -math.inf])
def test_an_unscorable_reward_is_zero_and_not_in_the_baseline(unscorable: float) -> None:
    """A01: 1, unscorable, 3 give +-0.7071 (sample) or +-1 (population), and 0 in the middle."""
    low, middle, high = _one_group([1.0, unscorable, 3.0])
    assert (low, high) == pytest.approx((-0.70711, 0.70711), abs=1e-4)
    assert middle == 0.0
    assert _one_group([1.0, unscorable, 3.0], POPULATION) == pytest.approx([-1, 0, 1], abs=1e-5)
    assert _one_group([unscorable, unscorable]) == [0.0, 0.0]


def test_a_rejected_sample_is_not_in_the_baseline() -> None:
    """A04: scores 100 (rejected) and 1: the second is judged alone, so 0, and never -49.5."""
    advantages = dr_grpo_advantages(
        torch.tensor([100.0, 1.0, 2.0, 4.0]),
        torch.tensor([0, 0, 1, 1]),
        accepted=torch.tensor([False, True, True, True]),
    )
    assert advantages.tolist() == [0.0, 0.0, -1.0, 1.0]


def test_the_prompt_is_the_grouping_key() -> None:
    """A02: four trajectories of one prompt are one group, whatever their own ids."""
    prompts = ["p", "q", "p", "q"]
    assert group_ids_of(prompts).tolist() == [0, 1, 0, 1]
    rewards = torch.tensor([1.0, 5.0, 0.0, 5.0])
    advantages = grpo_advantages(rewards, group_ids_of(prompts), config=SAMPLE)
    assert advantages.tolist() == pytest.approx([0.70711, 0.0, -0.70711, 0.0], abs=1e-4)


def test_large_common_offsets_cost_no_digits() -> None:
    """Rewards near a million differ by 1: the same advantages as 0 and 1."""
    assert _one_group([1e6, 1e6 + 1]) == _one_group([0.0, 1.0])


def test_no_samples_give_no_advantages() -> None:
    """An empty batch is a batch."""
    empty = torch.zeros(0)
    assert grpo_advantages(empty, torch.zeros(0, dtype=torch.int64), config=SAMPLE).shape == (0,)


@LAW
@given(
    data=st.lists(
        st.tuples(st.integers(-3, 3), st.floats(-10, 10, width=32)), min_size=1, max_size=24
    ),
    seed=st.integers(0, 1000),
)
def test_groups_are_independent_of_order_and_of_each_other(
    data: list[tuple[int, float]], seed: int
) -> None:
    """Permuting the samples permutes the advantages, and each group might as well be alone."""
    ids = torch.tensor([group for group, _ in data])
    rewards = torch.tensor([reward for _, reward in data], dtype=torch.float64)
    advantages = grpo_advantages(rewards, ids, config=SAMPLE)
    assert torch.isfinite(advantages).all()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        grpo_advantages(rewards[order], ids[order], config=SAMPLE), advantages[order]
    )
    for group in ids.unique():
        alone = rewards[ids == group]
        expected = (
            (alone - alone.mean()) / (alone.std() + 1e-6)
            if len(alone) > 1
            else torch.zeros_like(alone)
        )
        torch.testing.assert_close(advantages[ids == group], expected, rtol=1e-6, atol=1e-6)


@EVERY_KIND
@LAW
@given(
    data=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.floats(-10, 10, width=32) | st.sampled_from([math.nan, math.inf, -math.inf]),
            st.booleans(),
        ),
        max_size=24,
    ),
    seed=st.integers(0, 1000),
)
def test_every_kind_is_finite_and_blind_to_order_and_to_rejected_samples(
    config: GroupAdvantages, data: list[tuple[int, float, bool]], seed: int
) -> None:
    """A01, A04: finite for any rewards; permuting permutes; a rejected reward moves nobody."""
    ids = torch.tensor([group for group, _, _ in data], dtype=torch.int64)
    rewards = torch.tensor([reward for _, reward, _ in data], dtype=torch.float64)
    accepted = torch.tensor([taken for _, _, taken in data], dtype=torch.bool)
    advantages = group_advantages(rewards, ids, config=config, accepted=accepted)
    assert torch.isfinite(advantages).all()
    usable = accepted & torch.isfinite(rewards)
    assert (advantages[~usable] == 0.0).all()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    permuted = group_advantages(rewards[order], ids[order], config=config, accepted=accepted[order])
    torch.testing.assert_close(permuted, advantages[order])
    alone = group_advantages(rewards[usable], ids[usable], config=config)
    torch.testing.assert_close(alone, advantages[usable])
    elsewhere = group_advantages(
        torch.where(usable, rewards, 1e6), ids, config=config, accepted=usable
    )
    torch.testing.assert_close(elsewhere, advantages)


def test_settings_without_meaning_are_refused() -> None:
    """Epsilon must be positive, and the deviation one of two."""
    with pytest.raises(ValueError, match=r"GrpoAdvantages: expected epsilon above 0 and"):
        GrpoAdvantages(epsilon=0.0)
    with pytest.raises(ValueError, match=r"'std' must be in"):
        GrpoAdvantages(std="none")  # type: ignore[arg-type]
