"""Rewards for the shape of a completion."""

import pytest

from rl_tasks import ExactMatch, LengthWithin, Reward, TaggedSections, WeightedSum


def value(reward: Reward, text: str) -> float | None:
    return reward(text, ground_truth="4", finish_reason="stop").value


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>2+2</think><answer>4</answer>", True),
        (" <think>\n2+2\n</think>\n\n<answer>4</answer>\n", True),
        ("So: <think>2+2</think><answer>4</answer>", False),
        ("<think>2+2</think> so <answer>4</answer>", False),
        ("<think>2+2</think><answer>4</answer>!", False),
        ("<think></think><answer>4</answer>", False),
        ("<answer>4</answer><think>2+2</think>", False),
        ("<think>2+2<answer>4</answer></think>", False),
        ("<think>a</think><think>b</think><answer>4</answer>", False),
        ("<think>use </answer></think><answer>4</answer>", False),
        ("<think>2+2</think><answer>4", False),
        ("", False),
    ],
)
def test_sections_stand_in_order_once_and_alone(text: str, *, right: bool) -> None:
    """Anything outside, empty, doubled, nested or cut off is wrong."""
    assert value(TaggedSections(), text) == float(right)


def test_the_template_may_open_the_first_section() -> None:
    """Then the completion closes what the prompt opened, and must not open it again."""
    reward = TaggedSections(first_is_open=True)
    assert value(reward, "2+2</think><answer>4</answer>") == 1.0
    assert value(reward, "<think>2+2</think><answer>4</answer>") == 0.0


def test_lengths_are_inclusive() -> None:
    """White space at the ends does not count."""
    reward = LengthWithin(min_characters=2, max_characters=4)
    assert [value(reward, text) for text in ("a  ", "ab", "abcd", " abcd\n", "abcde")] == [
        0.0,
        1.0,
        1.0,
        1.0,
        0.0,
    ]


def test_they_add_up_with_others() -> None:
    """0.5 for the length and 1 for the answer, with both reasons."""
    reward = WeightedSum(parts=((1.0, ExactMatch()), (0.5, LengthWithin(max_characters=1))))
    result = reward("4", ground_truth="4", finish_reason="stop")
    assert (result.value, result.reason) == (1.5, "right+right")
    result = reward("44", ground_truth="4", finish_reason="stop")
    assert (result.value, result.reason) == (0.0, "wrong+too_long")


def test_shapes_that_nothing_has_are_refused() -> None:
    """No tags, one tag twice, a tag that is none, and limits that exclude each other."""
    for tags in ((), ("a", "a"), ("a b",), ("",)):
        with pytest.raises(ValueError, match="TaggedSections: expected different names"):
            TaggedSections(tags=tags)
    with pytest.raises(ValueError, match="min_characters = 5 is above max_characters = 4"):
        LengthWithin(min_characters=5, max_characters=4)
