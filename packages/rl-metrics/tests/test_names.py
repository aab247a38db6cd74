"""The list of names."""

import re

import pytest

from rl_metrics import METRICS, check_names


def test_every_name_has_three_parts_a_unit_and_a_sentence() -> None:
    """`<area>/<quantity>/<reduction>`, in lower case, documented."""
    for name, metric in METRICS.items():
        assert re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+/[a-z0-9_]+", name)
        assert metric.name == name
        assert metric.unit
        assert re.fullmatch(r"[A-Z].*\.", metric.description)


def test_known_names_pass() -> None:
    """The list itself is accepted."""
    check_names(METRICS)


def test_unknown_names_are_all_named_with_their_neighbours() -> None:
    """A slip of the pen leads to the right name, and all slips are shown at once."""
    with pytest.raises(
        ValueError,
        match=r"unknown metric 'reward/trian/mean'; nearest: reward/train/mean.*"
        r"unknown metric 'zzz'; no name is near; the list of names is rl_metrics\.METRICS",
    ):
        check_names(["reward/trian/mean", "reward/train/mean", "zzz"])


def test_the_list_cannot_be_changed() -> None:
    """There is one list, and no import adds to it."""
    with pytest.raises(TypeError, match="does not support item assignment"):
        METRICS["a/b/c"] = METRICS["reward/train/mean"]  # type: ignore[index]
