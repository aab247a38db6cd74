"""Soft punishment of long completions."""

import pytest
import torch

from algos_gspo_dapo_grpo import DapoConfig, SoftOverlong, soft_overlong_penalty


def test_the_punishment_grows_over_the_buffer_and_stays() -> None:
    """A19: limit 10, buffer 4: lengths 6, 7, 8, 10, 11 cost 0, 0.25, 0.5, 1 and still 1."""
    penalties = soft_overlong_penalty(
        torch.tensor([0, 6, 7, 8, 10, 11]), config=SoftOverlong(max_length=10, buffer=4)
    )
    assert penalties.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_the_factor_scales_the_punishment() -> None:
    """Half the factor, half the punishment."""
    config = SoftOverlong(max_length=10, buffer=4, factor=0.5)
    assert soft_overlong_penalty(torch.tensor([8, 12]), config=config).tolist() == [-0.25, -0.5]


def test_a_buffer_above_the_limit_is_refused() -> None:
    """A19: the range without punishment would end below length 0."""
    with pytest.raises(ValueError, match=r"got buffer 11 with max_length 10"):
        SoftOverlong(max_length=10, buffer=11)
    assert SoftOverlong(max_length=10, buffer=10).buffer == 10


@pytest.mark.parametrize("field", ["max_length", "buffer"])
def test_lengths_start_at_one(field: str) -> None:
    """A buffer of 0 tokens would divide by zero."""
    with pytest.raises(ValueError, match=rf"'{field}' must be >= 1: 0"):
        SoftOverlong(**({"max_length": 10, "buffer": 4} | {field: 0}))


def test_off_needs_nothing_and_on_needs_its_limits() -> None:
    """A20: None is off and takes no numbers; on without a limit is a clear error."""
    assert DapoConfig(overlong=None).overlong is None
    with pytest.raises(TypeError, match=r"max_length"):
        SoftOverlong(buffer=4)  # type: ignore[call-arg]
