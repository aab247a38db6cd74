"""Rewards."""

import threading
from pathlib import Path

import pytest

from rl_contracts import FinishReason
from rl_tasks import (
    ChatMessage,
    ExactMatch,
    LastBox,
    LastNumber,
    Problem,
    Reward,
    RewardResult,
    ScaledUnlessStopped,
    WeightedSum,
    grade,
    summarise,
)


def value(
    reward: Reward, text: str, ground_truth: str, finish_reason: FinishReason = "stop"
) -> float | None:
    return reward(text, ground_truth=ground_truth, finish_reason=finish_reason).value


@pytest.mark.parametrize(
    ("text", "ground_truth", "expected"),
    [
        ("9 + 3 = 12", "12", 1.0),
        ("The answer is 12.", "12", 1.0),
        ("12.0", "12", 1.0),
        ("it is 12, not 13", "12", 0.0),
        ("1,234", "1234", 1.0),
        ("-4", "-4", 1.0),
        ("\u22124", "-4", 1.0),
        ("7-4", "4", 1.0),
        ("(3)-4", "4", 1.0),
        ("= .5", "0.5", 1.0),
        ("so...5", "5", 1.0),
        (r"\boxed{12}", "12", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\left(12\right)", "12", 1.0),
        ("**12**", "12", 1.0),
        ("= 12**", "12", 1.0),
        ("_12_", "12", 1.0),
        ("$12$", "12", 1.0),
        (r"\(12\)", "12", 1.0),
        ("$12", "12", 1.0),
        ("12%", "12", 1.0),
        (r"12^\circ", "12", 1.0),
        (r"12\text{ cm}", "12", 1.0),
        ("12 cm", "12", 1.0),
        ("<answer>12</answer>", "12", 1.0),
        ("Step 3: 12", "12", 1.0),
        ("1/3 of 36 is 12", "12", 1.0),
        (r"\frac{36}{3} = 12", "12", 1.0),
        ("f(x) is 3 (or 12)", "12", 1.0),
        ("Of 3, 4 and 12", "12", 1.0),
        ("\u7b54\u6848\u662f12", "12", 1.0),
    ],
)
def test_the_last_number_counts(text: str, ground_truth: str, expected: float) -> None:
    """Numbers are read as people write them and compared as numbers."""
    assert value(LastNumber(), text, ground_truth) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (r"\boxed{\frac{1}{3}}", "3"),
        (r"\frac{1}{3}", "3"),
        (r"\frac {1} {3}", "3"),
        (r"\frac13", "13"),
        (r"\frac 1 3", "3"),
        (r"\frac1{3}", "3"),
        (r"\frac{1}3", "3"),
        (r"\frac{1}{3", "3"),
        (r"\frac{3}{x}", "3"),
        ("frac{1}{3}", "3"),
        ("1/3", "3"),
        ("1 / 3", "3"),
        ("1/" + " " * 1000 + "3", "3"),
        ("1/(3)", "3"),
        ("$1$/$3$", "3"),
        ("3/x", "3"),
        (r"1 \over 3", "3"),
        ("2^3", "3"),
        ("2^{3}", "3"),
        ("2^{n+3}", "3"),
        ("2^(3)", "3"),
        ("2**3", "3"),
        ("2 ** 3", "3"),
        ("2**n", "2"),
        ("2\u00b3", "2"),
        ("1e3", "1"),
        ("1e3", "3"),
        ("1e-3", "3"),
        ("1e-3", "-3"),
        ("1e5", "5"),
        ("10^{-3}", "-3"),
        ("10^-3", "-3"),
        ("3:45", "45"),
        ("3 : 45", "45"),
        ("1,23", "23"),
        ("12,34", "34"),
        ("0,123", "123"),
        ("1,234,56", "56"),
        (r"1{,}234", "234"),
        (r"1\,234", "234"),
        ("sqrt(2)", "2"),
        (r"\sqrt{2}", "2"),
        (r"\sqrt[3]{8}", "8"),
        (r"2\pi", "2"),
        (r"2 \sqrt{x}", "2"),
        ("2x", "2"),
        ("x2", "2"),
        ("x_2", "2"),
        ("x_{2}", "2"),
        ("12k", "12"),
        ("12\u4e07", "12"),
        ("2\u00bd", "2"),
        ("-(3)", "3"),
        ("-$3", "3"),
        ("x = - 3", "3"),
        ("is \u20133", "3"),
        ("version 1.2.3", "3"),
    ],
)
def test_a_part_of_another_number_is_no_answer(text: str, part: str) -> None:
    """A fraction, a power, a time or the like is not its last digits, boxed or not."""
    refused = RewardResult(value=0.0, reason="not_a_plain_number")
    assert LastNumber()(text, ground_truth=part, finish_reason="stop") == refused
    boxed = LastBox(inner=LastNumber())(
        rf"\boxed{{{text}}}", ground_truth=part, finish_reason="stop"
    )
    assert boxed.value == 0.0


@pytest.mark.parametrize("piece", ["(", "{", "\\frac{", "1,", "**", " ", "1/", "x_{2}", "1"])
def test_a_long_text_is_graded_in_one_pass(piece: str) -> None:
    """A hundred thousand brackets, commas or digits are graded, not searched for minutes."""
    result = LastNumber()(piece * 100_000, ground_truth="12", finish_reason="stop")
    assert result.value == 0.0


@pytest.mark.parametrize("sign", ["", "-"])
def test_numbers_of_any_length_are_compared_exactly(sign: str) -> None:
    """Ten thousand digits are neither an error (int() refuses above 4300) nor rounded."""
    digits = sign + "9" * 10_000
    assert value(LastNumber(), digits, digits) == 1.0
    assert value(LastNumber(), digits[:-1] + "8", digits) == 0.0


def test_reasons_tell_wrong_from_missing_and_from_a_broken_ground_truth() -> None:
    """A34's kind: what the grader cannot do has no value, so it is never averaged as wrong."""
    reward = LastNumber()
    assert reward("13", ground_truth="12", finish_reason="stop").reason == "wrong"
    assert reward("twelve", ground_truth="12", finish_reason="stop") == RewardResult(
        value=0.0, reason="no_number"
    )
    assert reward("12", ground_truth="twelve", finish_reason="stop") == RewardResult(
        value=None, reason="ground_truth_is_not_a_number"
    )


def test_a_summary_counts_grader_failures_apart() -> None:
    """A34: two right, one wrong and one failure have a mean of 2/3, not 2/4."""
    results = [
        RewardResult(value=1.0, reason="right"),
        RewardResult(value=1.0, reason="right"),
        RewardResult(value=0.0, reason="wrong"),
        RewardResult(value=None, reason="aborted"),
    ]
    summary = summarise(results)
    assert summary.mean == pytest.approx(2 / 3)
    assert (summary.num_scored, summary.num_unscorable) == (3, 1)
    assert summary.reasons == {"right": 2, "wrong": 1, "aborted": 1}
    assert summarise(results[3:]).mean is None


def test_grading_works_in_any_thread() -> None:
    """A34: 1/3 in a box is right in a thread that may not set signals."""
    found: list[float | None] = []
    text = r"So it is \boxed{\frac{1}{3}}."
    thread = threading.Thread(
        target=lambda: found.append(value(LastBox(), text, r"\frac{1}{3}")),
    )
    thread.start()
    thread.join()
    assert found == [1.0]


@pytest.mark.parametrize(
    "reward", [ExactMatch(), LastNumber(), LastBox(), LastBox(inner=LastNumber())]
)
@pytest.mark.parametrize(
    "attack",
    [
        "__import__('pathlib').Path('{path}').touch()",
        r"\boxed{{__import__('pathlib').Path('{path}').touch()}}",
        r"\boxed{{\begin{{pmatrix}} __import__('pathlib').Path('{path}').touch() \end{{pmatrix}}}}",
        r"\pi __import__('pathlib').Path('{path}').touch()",
    ],
)
def test_model_output_is_never_evaluated(reward: Reward, attack: str, tmp_path: Path) -> None:
    """A35: code in an answer scores 0, has no effect, and the next answer is graded as ever."""
    path = tmp_path / "owned"
    assert value(reward, attack.format(path=path), "12") == 0.0
    assert not path.exists()
    assert value(LastNumber(), "12", "12") == 1.0


def test_only_the_last_complete_box_of_the_response_is_graded() -> None:
    """A36: a response that boxes 5 then 7 answers 7; a box that never closes is no answer."""
    response = r"First \boxed{5}, no, \boxed{7}."
    assert value(LastBox(), response, "7") == 1.0
    assert value(LastBox(), response, "5") == 0.0
    assert value(LastBox(), response + r" Or \boxed{9", "7") == 1.0
    result = LastBox()("no box", ground_truth="7", finish_reason="stop")
    assert result == RewardResult(value=0.0, reason="no_box")


def test_the_prompt_is_never_graded() -> None:
    """A36: a prompt that shows a box has no part in grading a response without one."""
    problem = Problem(
        problem_id="p",
        messages=(ChatMessage(role="user", content=r"Put it in \boxed{7}."),),
        ground_truth="7",
        data_source="math",
    )
    result = grade({"math": LastBox()}, problem, text="I do not know", finish_reason="stop")
    assert result == RewardResult(value=0.0, reason="no_box")


def test_a_box_may_hold_a_number() -> None:
    """The content of the box goes to the inner reward."""
    assert value(LastBox(inner=LastNumber()), r"\boxed{1,000.0}", "1000") == 1.0


def test_exact_match_looks_past_white_space_at_the_ends_only() -> None:
    """`` a b `` is ``a b`` and not ``ab``."""
    assert value(ExactMatch(), " a b\n", "a b") == 1.0
    assert value(ExactMatch(), "ab", "a b") == 0.0


@pytest.mark.parametrize(
    ("text", "finish_reason", "expected"),
    [
        ("12", "stop", RewardResult(value=1.0, reason="right")),
        ("12", "length", RewardResult(value=0.25, reason="right_unstopped")),
        ("13", "length", RewardResult(value=0.0, reason="wrong_unstopped")),
        ("12", "abort", RewardResult(value=None, reason="aborted")),
    ],
)
def test_a_completion_that_was_cut_gets_less(
    text: str, finish_reason: FinishReason, expected: RewardResult
) -> None:
    """A cut completion is scaled; one that the caller aborted is not graded at all."""
    reward = ScaledUnlessStopped(inner=LastNumber(), factor=0.25)
    assert reward(text, ground_truth="12", finish_reason=finish_reason) == expected


def test_a_scale_that_would_do_nothing_is_refused() -> None:
    """A factor of 1 is a setting without effect."""
    with pytest.raises(ValueError, match=r"must be < 1\.0: 1\.0"):
        ScaledUnlessStopped(inner=LastNumber(), factor=1.0)


def test_a_weighted_sum_adds_up_and_fails_with_its_parts() -> None:
    """0.8 x 1 + 0.2 x 0 is 0.8; a part without a value leaves the sum without one."""
    reward = WeightedSum(parts=((0.8, LastNumber()), (0.2, ExactMatch())))
    result = reward("= 12", ground_truth="12", finish_reason="stop")
    assert result == RewardResult(value=0.8, reason="right+wrong")
    result = reward("= 12", ground_truth="twelve", finish_reason="stop")
    assert result == RewardResult(value=None, reason="ground_truth_is_not_a_number+wrong")


@pytest.mark.parametrize("weight", [0.0, float("nan"), float("inf")])
def test_a_weight_without_effect_or_without_sense_is_refused(weight: float) -> None:
    """Weights are finite and not 0, and there is at least one."""
    with pytest.raises(ValueError, match="finite weights other than 0"):
        WeightedSum(parts=((weight, ExactMatch()),))
    with pytest.raises(ValueError, match="at least one pair"):
        WeightedSum(parts=())


def test_an_unknown_data_source_is_refused_with_the_known_ones() -> None:
    """A33: grading names the problem, the known names and the nearest."""
    problem = Problem(
        problem_id="p1",
        messages=(ChatMessage(role="user", content="?"),),
        ground_truth="7",
        data_source="adition",
    )
    with pytest.raises(
        ValueError, match=r"problem p1: unknown data_source 'adition'; known: addition, math; did"
    ):
        grade(
            {"math": LastBox(), "addition": LastNumber()}, problem, text="7", finish_reason="stop"
        )
