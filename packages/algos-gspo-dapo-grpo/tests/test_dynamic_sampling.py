"""Filling a batch with groups that carry a signal."""

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from algos_gspo_dapo_grpo import (
    DynamicSampling,
    DynamicSamplingError,
    InformativeBatch,
    InformativeBatchBuilder,
    informative_batches,
    is_informative,
)

Scores = list[float]
# No deadline: the machine may be busy, and no law here is about time.
LAW = settings(deadline=None, max_examples=25, derandomize=True)
UNIFORM: Scores = [1.0, 1.0]
MIXED: Scores = [0.0, 1.0]


def _batches(
    groups: Iterator[Scores], *, num_groups: int, config: DynamicSampling
) -> Iterator[InformativeBatch[Scores]]:
    return informative_batches(groups, scores_of=list, num_groups=num_groups, config=config)


def test_uniform_groups_are_left_out_and_counted() -> None:
    """Two batches of two out of six candidates, in order, with the count of those left out."""
    source = [MIXED, UNIFORM, [0.0, 2.0], [3.0, 0.0], UNIFORM, [0.0, 4.0]]
    first, second = _batches(
        iter(source), num_groups=2, config=DynamicSampling(max_rounds=None, incomplete="raise")
    )
    assert first.groups == (MIXED, [0.0, 2.0])
    assert (first.num_candidates, first.num_uniform) == (3, 1)
    assert second.groups == ([3.0, 0.0], [0.0, 4.0])
    assert (second.num_candidates, second.num_uniform) == (3, 1)


def test_the_bound_is_exact_and_the_error_names_the_share() -> None:
    """A21: an endless source of uniform groups: 3 rounds of 2 are drawn, then it gives up."""
    drawn = 0

    def source() -> Iterator[Scores]:
        nonlocal drawn
        while True:
            drawn += 1
            yield UNIFORM

    batches = _batches(
        source(), num_groups=2, config=DynamicSampling(max_rounds=3, incomplete="yield")
    )
    with pytest.raises(
        DynamicSamplingError,
        match=r"3 rounds of 2 groups gave 0 of the 2 groups needed: 6 of 6 candidates \(100%\)",
    ):
        next(batches)
    assert drawn == 6


def test_a_batch_that_the_last_allowed_group_fills_is_full() -> None:
    """The bound is on giving up, not on succeeding."""
    config = DynamicSampling(max_rounds=2, incomplete="raise")
    (batch,) = _batches(iter([UNIFORM, UNIFORM, MIXED, MIXED]), num_groups=2, config=config)
    assert batch.num_candidates == 4


def test_the_bound_starts_again_with_every_batch() -> None:
    """Each batch has its own rounds."""
    config = DynamicSampling(max_rounds=2, incomplete="raise")
    source = itertools.chain.from_iterable([UNIFORM, MIXED] for _ in range(5))
    assert len(list(_batches(source, num_groups=1, config=config))) == 5


def test_without_a_bound_the_end_of_the_source_ends_the_search() -> None:
    """A21: "no limit" is still bounded by the epoch; candidates without a signal are counted."""
    config = DynamicSampling(max_rounds=None, incomplete="yield")
    (batch,) = _batches(iter([UNIFORM] * 100), num_groups=2, config=config)
    assert (batch.groups, batch.num_candidates, batch.num_uniform) == ((), 100, 100)


def test_a_short_last_batch_is_handed_out_or_refused_as_configured() -> None:
    """A21: what happens to a partial batch is a setting, and nothing is dropped in silence."""
    source = [MIXED, MIXED, MIXED]
    config = DynamicSampling(max_rounds=None, incomplete="yield")
    full, short = _batches(iter(source), num_groups=2, config=config)
    assert (len(full.groups), len(short.groups)) == (2, 1)
    config = DynamicSampling(max_rounds=None, incomplete="raise")
    batches = _batches(iter(source), num_groups=2, config=config)
    next(batches)
    with pytest.raises(DynamicSamplingError, match=r"the source ended with 1 of the 2 groups"):
        next(batches)


def test_a_source_that_ends_with_a_full_batch_ends_quietly() -> None:
    """No batch was begun, so there is nothing to hand out and nothing to refuse."""
    config = DynamicSampling(max_rounds=1, incomplete="raise")
    assert len(list(_batches(iter([MIXED, MIXED]), num_groups=2, config=config))) == 1
    assert list(_batches(iter([]), num_groups=2, config=config)) == []


def test_nothing_is_drawn_beyond_the_batch_in_hand() -> None:
    """A lazy source samples nothing in vain."""
    source = iter([MIXED, MIXED, MIXED])
    config = DynamicSampling(max_rounds=1, incomplete="yield")
    next(_batches(source, num_groups=2, config=config))
    assert list(source) == [MIXED]


def test_scores_that_are_not_finite_do_not_make_a_signal() -> None:
    """A01's kind: an unscorable sample is no difference to learn from."""
    assert not is_informative([1.0, math.nan, 1.0])
    assert not is_informative([1.0, math.nan])
    assert not is_informative([1.0])
    assert not is_informative([])
    assert is_informative([1.0, math.nan, 0.0])


@LAW
@given(
    kinds=st.lists(st.booleans(), max_size=40),
    num_groups=st.integers(1, 5),
)
def test_every_candidate_is_counted_once(kinds: list[bool], num_groups: int) -> None:
    """Over all batches, candidates add up to the source and kept groups to its mixed ones."""
    source = [MIXED if mixed else UNIFORM for mixed in kinds]
    config = DynamicSampling(max_rounds=None, incomplete="yield")
    batches = list(_batches(iter(source), num_groups=num_groups, config=config))
    assert sum(batch.num_candidates for batch in batches) == len(source)
    assert sum(len(batch.groups) for batch in batches) == sum(kinds)
    assert all(len(batch.groups) == num_groups for batch in batches[:-1])


def test_settings_without_meaning_are_refused() -> None:
    """0 rounds is not "no limit", and an empty batch cannot be filled."""
    with pytest.raises(ValueError, match=r"'max_rounds' must be >= 1: 0"):
        DynamicSampling(max_rounds=0, incomplete="raise")
    with pytest.raises(ValueError, match=r"'incomplete' must be in"):
        DynamicSampling(max_rounds=1, incomplete="drop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected num_groups >= 1, got 0"):
        InformativeBatchBuilder(
            num_groups=0, config=DynamicSampling(max_rounds=1, incomplete="raise")
        )
