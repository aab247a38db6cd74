"""The addition task."""

import pytest
from hypothesis import given, strategies as st

from rl_contracts import FinishReason
from rl_tasks import AdditionConfig, ChatMessage, Problem, addition_problems, addition_reward, grade


def pairs(problems: tuple[Problem, ...]) -> set[tuple[int, int]]:
    found = set()
    for problem in problems:
        a, b = problem.extra_info["a"], problem.extra_info["b"]
        assert isinstance(a, int)
        assert isinstance(b, int)
        found.add((a, b))
    return found


@given(num_heldout=st.integers(1, 99), split_seed=st.integers())
def test_the_split_is_exact_and_keeps_mirror_images_together(
    num_heldout: int, split_seed: int
) -> None:
    """Each of the 100 problems is on one side, a + b on the same side as b + a."""
    split = addition_problems(AdditionConfig(num_heldout=num_heldout, split_seed=split_seed))
    train, heldout = pairs(split.train), pairs(split.heldout)
    assert len(split.heldout) == num_heldout == len(heldout)
    assert train | heldout == {(a, b) for a in range(10) for b in range(10)}
    assert not train & heldout
    assert heldout == {(b, a) for a, b in heldout}


def test_doubles_are_held_out_as_often_as_the_rest() -> None:
    """Of 20 held-out problems 2 are doubles, as 10 of 100 are."""
    for split_seed in range(5):
        split = addition_problems(AdditionConfig(split_seed=split_seed))
        assert sum(a == b for a, b in pairs(split.heldout)) == 2


def test_the_default_split_is_written_down() -> None:
    """Results on held-out problems of different releases compare."""
    heldout = addition_problems(AdditionConfig()).heldout
    ids = " ".join(problem.problem_id.removeprefix("addition/") for problem in heldout)
    assert ids == (
        "0+0 0+6 0+8 2+6 2+8 3+5 3+9 4+9 5+3 5+9 6+0 6+2 8+0 8+2 8+8 8+9 9+3 9+4 9+5 9+8"
    )


def test_another_seed_holds_out_other_problems() -> None:
    """The seed has an effect."""
    splits = {
        frozenset(pairs(addition_problems(AdditionConfig(split_seed=seed)).heldout))
        for seed in range(10)
    }
    assert len(splits) == 10


def test_a_problem_reads_as_asked() -> None:
    """One user turn, no system prompt, the sum as ground truth."""
    problem = addition_problems(AdditionConfig()).heldout[-1]
    assert problem.messages == (ChatMessage(role="user", content="What is 9 + 8?"),)
    assert problem.ground_truth == "17"
    assert problem.problem_id == "addition/9+8"


@pytest.mark.parametrize(
    ("text", "finish_reason", "expected"),
    [
        ("9 + 8 = 17", "stop", 1.0),
        ("9 + 8 = 17. Now", "length", 0.5),
        ("To find 9 + 8", "length", 0.0),
        ("9 + 8 = 17", "abort", None),
    ],
)
def test_the_reward_is_halved_unless_the_model_ends(
    text: str, finish_reason: FinishReason, expected: float | None
) -> None:
    """1 for the right last number, half of it if the length limit cut the answer."""
    problem = addition_problems(AdditionConfig()).heldout[-1]
    rewards = {"addition": addition_reward()}
    assert grade(rewards, problem, text=text, finish_reason=finish_reason).value == expected


@pytest.mark.parametrize("num_heldout", [0, 100])
def test_a_split_with_an_empty_side_is_refused(num_heldout: int) -> None:
    """There is something to train on and something to test on."""
    with pytest.raises(ValueError, match=f"'num_heldout' must be .*: {num_heldout}"):
        AdditionConfig(num_heldout=num_heldout)
