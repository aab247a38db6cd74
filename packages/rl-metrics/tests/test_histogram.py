"""The staleness histogram."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from rl_metrics import check_names, staleness_histogram
from rl_metrics.histogram import STALENESS_BINS


def test_counts_by_hand() -> None:
    """Bins of one step up to 4, then 5 to 8, 9 to 16, and the rest."""
    counts = staleness_histogram([0, 0, 1, 4, 5, 8, 9, 16, 17, 900])
    assert {name: count for name, count in counts.items() if count} == {
        "staleness/at_0/trajectories": 2,
        "staleness/at_1/trajectories": 1,
        "staleness/at_4/trajectories": 1,
        "staleness/at_5_to_8/trajectories": 2,
        "staleness/at_9_to_16/trajectories": 2,
        "staleness/at_17_up/trajectories": 2,
    }
    check_names(counts)


def test_bins_have_no_gap() -> None:
    """Each begins where the one before ends, from 0 without end."""
    assert STALENESS_BINS[0].first == 0
    assert STALENESS_BINS[-1].last == math.inf
    assert all(after.first == before.last + 1 for before, after in pairwise(STALENESS_BINS))


@given(st.lists(st.integers(0, 40)))
def test_no_trajectory_is_lost(stalenesses: list[int]) -> None:
    """The counts add up, and every bin is there, so that a chart has all its parts."""
    counts = staleness_histogram(stalenesses)
    assert sum(counts.values()) == len(stalenesses)
    assert len(counts) == len(STALENESS_BINS)


def test_a_negative_staleness_is_refused() -> None:
    """It would mean: trained before it was sampled."""
    with pytest.raises(ValueError, match="expected stalenesses from 0 on, got -1"):
        staleness_histogram([0, -1])
