"""The nouns check, where data is made, that their parts belong together."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from rl_contracts import Completion, PolicyVersion, SamplingParams, Trajectory

V0, V1 = PolicyVersion(0), PolicyVersion(1)


def completion(**changes: object) -> Completion:
    values: dict[str, object] = {
        "token_ids": (7, 8),
        "rollout_logprobs": (-0.5, -0.25),
        "policy_versions": (V0, V1),
        "finish_reason": "stop",
    }
    return Completion(**{**values, **changes})  # type: ignore[arg-type]


def test_a_completion_has_one_entry_per_token() -> None:
    """A missing logprob or version is refused with both numbers."""
    with pytest.raises(ValueError, match=r"rollout_logprobs per token, got 1 for 2 tokens"):
        completion(rollout_logprobs=(-0.5,))
    with pytest.raises(ValueError, match=r"policy_versions per token, got 3 for 2 tokens"):
        completion(policy_versions=(V0, V0, V0))


def test_versions_never_fall() -> None:
    """A later token cannot come from older weights."""
    with pytest.raises(ValueError, match=r"must not fall along the tokens, got 0 after 1"):
        completion(policy_versions=(V1, V0))


def test_a_trajectory_joins_prompt_and_completion() -> None:
    """Masks, logprobs and versions line up with the joined tokens."""
    row = Trajectory.from_completion([1, 2, 3], completion(), trajectory_id="t", group_id="g")
    assert row.token_ids == (1, 2, 3, 7, 8)
    assert row.loss_mask == (False, False, False, True, True)
    assert row.rollout_logprobs == (0.0, 0.0, 0.0, -0.5, -0.25)
    assert (row.oldest_version, row.newest_version) == (0, 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoutedCompletion(Completion):
    """As a sampler of a mixture of experts returns it."""

    routed_experts: "np.ndarray[Any, np.dtype[np.uint8]]"


def test_a_trajectory_carries_the_experts_of_its_tokens() -> None:
    """Four of five tokens have them; they say nothing about whether two trajectories are equal."""
    given = completion()
    routes = np.arange(8, dtype=np.uint8).reshape(4, 2, 1)
    routed = RoutedCompletion(
        token_ids=given.token_ids,
        rollout_logprobs=given.rollout_logprobs,
        policy_versions=given.policy_versions,
        finish_reason=given.finish_reason,
        routed_experts=routes,
    )
    row = Trajectory.from_completion([1, 2, 3], routed, trajectory_id="t", group_id="g")
    assert row.routed_experts is routes
    plain = Trajectory.from_completion([1, 2, 3], given, trajectory_id="t", group_id="g")
    assert plain.routed_experts is None
    assert plain == row
    with pytest.raises(ValueError, match=r"of shape \(4, layers, .* got \(3, 2, 1\)"):
        replace(row, routed_experts=routes[:3])
    with pytest.raises(ValueError, match=r"all tokens but the last, got \(4, 2\)"):
        replace(row, routed_experts=routes[:, :, 0])


def test_a_trajectory_needs_a_prompt_and_a_token() -> None:
    """Nothing to condition on, or nothing sampled, is refused with the counts."""
    with pytest.raises(ValueError, match=r"at least one token each, got 0 and 2"):
        Trajectory.from_completion([], completion(), trajectory_id="t", group_id="g")
    with pytest.raises(ValueError, match=r"loss_mask is True on the first token"):
        Trajectory(
            trajectory_id="t",
            group_id="g",
            token_ids=(1,),
            loss_mask=(True,),
            rollout_logprobs=(-1.0,),
            oldest_version=V0,
            newest_version=V0,
        )


def test_sampling_params_have_bounds() -> None:
    """No negative temperature, no empty nucleus, no completion of zero tokens."""
    for wrong in ({"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SamplingParams(**{"max_new_tokens": 1, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_sampling_params_are_finite(name: str, value: float) -> None:
    """An infinite temperature would draw every token alike, without a word (A24)."""
    changes: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=rf"{name}: expected a finite number, got {value}"):
        SamplingParams(max_new_tokens=1, **changes)
