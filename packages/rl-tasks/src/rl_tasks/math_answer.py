r"""A reward for mathematical answers, graded in processes of its own with real time limits."""

import re
from typing import final

import attrs

from rl_contracts import FinishReason
from rl_tasks.boxed import last_complete_box
from rl_tasks.math_equality import PercentRule, answers_are_equal
from rl_tasks.math_pool import ComparisonFailedError, WorkerDiedError, equal_by_algebra
from rl_tasks.rewards import RewardResult

_ANSWER_LINE = re.compile(r"####[ \t]*(?P<answer>[^\n]+)")
_ANY_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_NUMBER_AT_END = re.compile(
    r"(?<![\w.,/^\\:-])(?P<number>-?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?%?)"
    r"(?![\w/^:]|[.,][0-9])"
)

_MAX_ANSWER = 2_000
"""Characters of an answer that are read; those of data sets have some tens."""


@final
@attrs.frozen(kw_only=True)
class MathAnswer:
    r"""1 if the completion's final answer is mathematically equal to the ground truth.

    The final answer is the content of the last complete ``\boxed{...}``; in a text without any box,
    what follows the last ``####`` (GSM8K), else the last number that stands alone. A box that never
    closes is no answer.

    Conventions, each as the usual data sets have them: the order of a list without parentheses does
    not matter; ``x = 5`` is 5; an interval equals its inequality; a unit, a degree or a currency
    sign that only one of the two has is ignored, and two different units are never equal; a decimal
    is exact, so 0.33 is not a third.

    What needs algebra is compared by math-verify (extra ``rl-tasks[math]``) in `num_workers`
    processes, each answer with a time limit; the process of an answer that exceeds it is killed.
    What was decided there is remembered, since samples of one prompt often have the same answer.
    Safe to call from several threads; blocks its own.

    Reasons: ``right``, ``wrong``, ``no_answer``, ``answer_too_long``; without a value
    ``timed_out``, ``grader_died`` and ``grader_failed_<error>``.
    """

    percent: PercentRule = attrs.field(
        default="either", validator=attrs.validators.in_(("either", "value"))
    )
    """What ``50%`` is equal to: with ``value`` to 0.5; with ``either`` also to 50, since data sets
    (MATH among them) leave the sign out of their answers. Default: lenient."""

    timeout_s: float = attrs.field(
        default=5.0, validator=[attrs.validators.gt(0.0), attrs.validators.le(86_400.0)]
    )
    """Seconds that one comparison may take. Default: that of math-verify."""

    num_workers: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    """Processes, shared by all rewards of this process with the same number. Default: two, which
    is enough where most answers are numbers; those need none."""

    def __call__(
        self, text: str, *, ground_truth: str, finish_reason: FinishReason
    ) -> RewardResult:
        """Grade `text`."""
        del finish_reason
        answer = final_answer(text)
        if answer is None:
            return RewardResult(value=0.0, reason="no_answer")
        if len(answer) > _MAX_ANSWER:
            return RewardResult(value=0.0, reason="answer_too_long")
        equal = answers_are_equal(answer, ground_truth, percent=self.percent, needs_algebra=False)
        if equal is None:
            return self._by_algebra(answer, ground_truth)
        return _result(equal=equal)

    def _by_algebra(self, answer: str, ground_truth: str) -> RewardResult:
        try:
            equal = equal_by_algebra(
                answer,
                ground_truth,
                self.percent,
                timeout_s=self.timeout_s,
                num_workers=self.num_workers,
            )
        except TimeoutError:
            return RewardResult(value=None, reason="timed_out")
        except WorkerDiedError:
            return RewardResult(value=None, reason="grader_died")
        except ComparisonFailedError as error:
            return RewardResult(value=None, reason=f"grader_failed_{error}")
        return _result(equal=equal)


def final_answer(text: str) -> str | None:
    r"""The final answer of a completion, or None; see `MathAnswer`."""
    if _ANY_BOX.search(text):
        return last_complete_box(text)
    lines = _ANSWER_LINE.findall(text)
    if lines:
        return str(lines[-1]).strip()
    numbers = _NUMBER_AT_END.findall(text)
    return str(numbers[-1]) if numbers else None


def _result(*, equal: bool) -> RewardResult:
    if equal:
        return RewardResult(value=1.0, reason="right")
    return RewardResult(value=0.0, reason="wrong")
