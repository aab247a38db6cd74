"""Rewards: pure functions of a completion's text, its end, and the ground truth.

A reward never sees the prompt, so it cannot grade it by mistake, and never evaluates what a model
wrote: answers are matched and compared as text and as decimal numbers. It has no time-out and no
signal, since everything here is linear in the text, so it works in any thread.

A completion that is wrong has the value 0. One that *could not be graded* has no value at all:
averaging such failures as zeros hides a broken grader behind a policy that seems not to learn.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol, final

import attrs

from rl_contracts import FinishReason
from rl_tasks.boxed import last_complete_box
from rl_tasks.problem import Problem
from rl_tasks.sources import check_data_source


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """What a grader says about one completion."""

    value: float | None
    """The reward; None if it could not be graded, which is not the same as wrong."""

    reason: str
    """Why, in one of the few words that the reward's docstring lists; results are counted by it."""


class Reward(Protocol):
    """Grades one completion."""

    def __call__(
        self, text: str, *, ground_truth: str, finish_reason: FinishReason
    ) -> RewardResult:
        """Grade `text`, the completion alone, against `ground_truth`."""


@final
@attrs.frozen(kw_only=True)
class ExactMatch:
    """1 if the text equals the ground truth, white space at the ends aside.

    Reasons: ``right``, ``wrong``.
    """

    def __call__(
        self, text: str, *, ground_truth: str, finish_reason: FinishReason
    ) -> RewardResult:
        """Grade `text`."""
        del finish_reason
        return _right_or_wrong(right=text.strip() == ground_truth.strip())


@final
@attrs.frozen(kw_only=True)
class LastNumber:
    """1 if the last number in the text is the number that the ground truth is.

    Numbers are plain decimals: ``12``, ``-3.50``, ``1,234``; a minus counts as a sign unless
    something stands right before it that it could be subtracted from. They are compared exactly,
    so ``12.0`` is 12. Fractions, powers and words are not read.

    Reasons: ``right``, ``wrong``, ``no_number``; without a value
    ``ground_truth_is_not_a_number``.
    """

    def __call__(
        self, text: str, *, ground_truth: str, finish_reason: FinishReason
    ) -> RewardResult:
        """Grade `text`."""
        del finish_reason
        expected = _NUMBER.fullmatch(ground_truth.strip())
        if expected is None:
            return RewardResult(value=None, reason="ground_truth_is_not_a_number")
        last = None
        for last in _NUMBER.finditer(text):  # noqa: B007 - the last one is wanted
            pass
        if last is None:
            return RewardResult(value=0.0, reason="no_number")
        return _right_or_wrong(right=_decimal(last) == _decimal(expected))


@final
@attrs.frozen(kw_only=True)
class LastBox:
    r"""Grades what stands in the last complete ``\boxed{...}`` (or ``\fbox{...}``) of the text.

    Reasons: ``no_box``, and those of `inner`.
    """

    inner: Reward = ExactMatch()
    """Grades the content of the box."""

    def __call__(
        self, text: str, *, ground_truth: str, finish_reason: FinishReason
    ) -> RewardResult:
        """Grade `text`."""
        content = last_complete_box(text)
        if content is None:
            return RewardResult(value=0.0, reason="no_box")
        return self.inner(content, ground_truth=ground_truth, finish_reason=finish_reason)


@final
@attrs.frozen(kw_only=True)
class ScaledUnlessStopped:
    """Another reward, scaled down where a length limit cut the completion.

    Teaches a model to end. A completion that the caller aborted is no fault of the model's and
    gets no value.

    Reasons: those of `inner`, with ``_unstopped`` behind them if it was scaled; without a value
    ``aborted``.
    """

    inner: Reward

    factor: float = attrs.field(
        default=0.5, validator=[attrs.validators.ge(0.0), attrs.validators.lt(1.0)]
    )
    """Share of the reward that is left; a factor of 1 would be no scaling. Default: half."""

    def __call__(
        self, text: str, *, ground_truth: str, finish_reason: FinishReason
    ) -> RewardResult:
        """Grade `text`."""
        if finish_reason == "abort":
            return RewardResult(value=None, reason="aborted")
        result = self.inner(text, ground_truth=ground_truth, finish_reason=finish_reason)
        if finish_reason == "stop" or result.value is None:
            return result
        return RewardResult(value=result.value * self.factor, reason=f"{result.reason}_unstopped")


def _check_parts(
    _: object,
    attribute: "attrs.Attribute[tuple[tuple[float, Reward], ...]]",
    parts: tuple[tuple[float, Reward], ...],
) -> None:
    if not parts:
        message = (
            f"WeightedSum: expected at least one pair of weight and reward in {attribute.name}"
        )
        raise ValueError(message)
    for weight, _reward in parts:
        if not math.isfinite(weight) or weight == 0.0:
            message = (
                f"WeightedSum: expected finite weights other than 0, got {weight}; leave out a "
                "reward that is not to count"
            )
            raise ValueError(message)


@final
@attrs.frozen(kw_only=True)
class WeightedSum:
    """Several rewards, each times its weight, added up; the weights need not add up to 1.

    Reasons: those of the parts, joined by ``+``. Without a value if one part has none.
    """

    parts: tuple[tuple[float, Reward], ...] = attrs.field(validator=_check_parts)
    """Pairs of weight and reward."""

    def __call__(
        self, text: str, *, ground_truth: str, finish_reason: FinishReason
    ) -> RewardResult:
        """Grade `text`."""
        total: float | None = 0.0
        reasons = []
        for weight, reward in self.parts:
            result = reward(text, ground_truth=ground_truth, finish_reason=finish_reason)
            reasons.append(result.reason)
            total = None if total is None or result.value is None else total + weight * result.value
        return RewardResult(value=total, reason="+".join(reasons))


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSummary:
    """Many results, failures of the grader kept apart from wrong answers."""

    mean: float | None
    """Over the results that have a value; None if none has."""

    num_scored: int
    num_unscorable: int

    reasons: Mapping[str, int]
    """How often each reason was given, most frequent first."""


def summarise(results: Iterable[RewardResult]) -> RewardSummary:
    """Count results by reason, and average those that have a value."""
    results = list(results)
    values = [result.value for result in results if result.value is not None]
    return RewardSummary(
        mean=math.fsum(values) / len(values) if values else None,
        num_scored=len(values),
        num_unscorable=len(results) - len(values),
        reasons=dict(Counter(result.reason for result in results).most_common()),
    )


def grade(
    rewards: Mapping[str, Reward], problem: Problem, *, text: str, finish_reason: FinishReason
) -> RewardResult:
    """Grade a completion with the reward that its problem's data source names.

    Raises:
        ValueError: for a data source without a reward; lists the known ones.
    """
    check_data_source(problem.data_source, rewards, f"problem {problem.problem_id}")
    reward = rewards[problem.data_source]
    return reward(text, ground_truth=problem.ground_truth, finish_reason=finish_reason)


_NUMBER = re.compile(
    r"""
    (?<![0-9]) (?<![0-9]\.) (?<![0-9][eE])      # not in the middle of a longer number
    (?P<sign> (?<![0-9A-Za-z)\]}]) [-\u2212+] )?
    (?P<digits>
        (?: [0-9]{1,3} (?: ,[0-9]{3} )+ (?![0-9]) | [0-9]+ ) (?: \.[0-9]+ )?
        | (?<!\.) \.[0-9]+
    )
    """,
    re.VERBOSE,
)
"""A decimal number. ``\\u2212`` is the typographic minus."""


def _decimal(match: "re.Match[str]") -> Decimal:
    # Decimal, unlike int, has no limit of digits and no superlinear conversion
    number = Decimal(match["digits"].replace(",", ""))
    # the minus operator would round to the context's 28 digits
    return number.copy_negate() if match["sign"] in {"-", "\u2212"} else number


def _right_or_wrong(*, right: bool) -> RewardResult:
    return (
        RewardResult(value=1.0, reason="right")
        if right
        else RewardResult(value=0.0, reason="wrong")
    )
