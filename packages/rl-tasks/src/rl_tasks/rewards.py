"""Rewards: pure functions of a completion's text, its end, and the ground truth.

A reward never sees the prompt, so it cannot grade it by mistake, and never evaluates what a model
wrote: answers are matched and compared as text and as decimal numbers. Those of this module have no
time-out and no signal, since everything here is linear in the text. All work in any thread.

A completion that is wrong has the value 0. One that *could not be graded* has no value at all:
averaging such failures as zeros hides a broken grader behind a policy that seems not to learn.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, final

import attrs

from rl_contracts import FinishReason
from rl_tasks.boxed import last_complete_box
from rl_tasks.numbers import last_number, plain_number
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
    r"""1 if the last number in the text is the number that the ground truth is.

    Numbers are plain decimals: ``12``, ``-3.50``, ``1,234``; a minus counts as a sign unless
    something stands right before it that it could be subtracted from. They are compared exactly,
    so ``12.0`` is 12.

    The last number must stand alone. A part of another number is not read for the whole and
    scores 0: ``1/3``, ``\frac{1}{3}``, ``2^3``, ``2**3``, ``10^{-3}``, ``1e3``, ``x_2``, ``3:45``,
    ``1,23``, ``sqrt(2)``, ``2\pi``, ``2x``, and a number that touches a letter at all, so leave a
    space before a unit: ``12 cm``. Of a sum or a product the last operand counts, as in
    ``9 + 3``.

    What only decorates a number is not read: ``$12$``, ``**12**``, ``_12_``, ``$12``, ``12.``;
    nor are signs of units, so ``12%`` and ``12^\circ`` are 12. Words are not read either:
    ``3 million`` is 3.

    Reasons: ``right``, ``wrong``, ``no_number``, ``not_a_plain_number``; without a value
    ``ground_truth_is_not_a_number``.
    """

    def __call__(
        self, text: str, *, ground_truth: str, finish_reason: FinishReason
    ) -> RewardResult:
        """Grade `text`."""
        del finish_reason
        expected = plain_number(ground_truth)
        if expected is None:
            return RewardResult(value=None, reason="ground_truth_is_not_a_number")
        answer = last_number(text)
        if isinstance(answer, str):
            return RewardResult(value=0.0, reason=answer)
        return _right_or_wrong(right=answer == expected)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One completion that is to be graded."""

    problem: Problem

    text: str
    """The completion alone."""

    finish_reason: FinishReason


def grade_all(
    rewards: Mapping[str, Reward], answers: Sequence[Answer], *, num_threads: int
) -> list[RewardResult]:
    """Grade many completions; the same results, in the same order, as `grade` one by one.

    Threads help where a reward waits: for a sandbox, for a worker process, for a judge. Rewards
    that only compare gain nothing by them.

    Raises:
        ValueError: for a data source without a reward, or for no thread.
    """

    def one(answer: Answer) -> RewardResult:
        return grade(rewards, answer.problem, text=answer.text, finish_reason=answer.finish_reason)

    with ThreadPoolExecutor(max_workers=num_threads) as threads:
        return list(threads.map(one, answers))


def _right_or_wrong(*, right: bool) -> RewardResult:
    return (
        RewardResult(value=1.0, reason="right")
        if right
        else RewardResult(value=0.0, reason="wrong")
    )
