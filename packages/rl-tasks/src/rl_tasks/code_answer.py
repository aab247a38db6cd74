r"""A reward for programs: the code of a completion against test cases, run in a sandbox.

What the code under test is given is the input alone. What it should answer, and the comparison,
stay in this process, so no trick inside the sandbox can turn a wrong answer into a right one:
there is nothing to patch and no marker to print.

The ground truth is JSON, as in verl's code data sets (``prime_code``: APPS, TACO, Codeforces).
Standard input and output; a function's arguments, one JSON value a line, and its result; or the
same as APPS has it, where a result may stand in a list of one::

    {"inputs": ["1 2\n", ...],  "outputs": ["3\n", ...]}
    {"inputs": ["1\n2", ...],   "outputs": ["3", ...],    "fn_name": "add"}
    {"inputs": [[1, 2], ...],   "outputs": [[3], ...],    "fn_name": "add"}
"""

import json
import math
from pathlib import Path
from typing import Literal, NamedTuple, final

import attrs

from rl_contracts import FinishReason
from rl_tasks.problem import JsonValue
from rl_tasks.rewards import RewardResult
from rl_tasks.sandbox import check_sandbox, run_python
from rl_tasks.sandbox_limits import (
    ProgramResult,
    SandboxFailedError,
    SandboxLimits,
    SandboxUnavailableError,
)

_MAX_CODE = 200_000
"""Characters of a program that are run."""

_MAX_TIME_LIMITS = 3
"""Test cases that one program may run into the time limit of; those after them are not run."""

_LANGUAGES = frozenset({"python", "python3", "py"})

# The program that calls a function: it reads name and arguments, hides standard output from the
# code, and writes the result as JSON. The code may do this by itself too; it gains nothing by it.
_CALLER = """\
import json, os, sys, typing
name, arguments = json.load(sys.stdin)
result_fd = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
names = {name: getattr(typing, name) for name in typing.__all__}
names["__name__"] = "solution"
with open("solution.py", "rb") as file:
    exec(compile(file.read(), "solution.py", "exec"), names)
function = names.get(name)
if "Solution" in names and function is getattr(typing, name, None):
    function = getattr(names["Solution"](), name)
result = json.dumps(function(*arguments))
with open(result_fd, "w", encoding="utf-8") as file:
    file.write(result)
"""


class _Case(NamedTuple):
    stdin: str
    expected: tuple[str, ...]
    """Any of them is right."""


class _TestCases(NamedTuple):
    cases: list[_Case]
    function: bool


class _NoTestCasesError(ValueError):
    pass


def _check_paths(
    _: object, attribute: "attrs.Attribute[tuple[Path, ...]]", paths: tuple[Path, ...]
) -> None:
    for path in paths:
        if not path.is_absolute() or not path.is_dir():
            message = (
                f"CodeAnswer: expected absolute paths of folders in {attribute.name}, got {path}"
            )
            raise ValueError(message)


@final
@attrs.frozen(kw_only=True)
class CodeAnswer:
    """1 if the completion's program passes the ground truth's test cases.

    The program is the last fenced block of the completion that says ``python``; a block that never
    closes is none. Every test case runs in a sandbox of its own (`rl_tasks.sandbox`), one after the
    other; a program that does not end with exit code 0 has not passed.

    Output is compared line by line, white space at the ends of lines and of the whole aside;
    results of functions as JSON values, so a tuple equals a list, 3 equals 3.0, and 1 is not true.
    Functions may be methods of a class ``Solution``, and find the names of ``typing`` without
    importing them, as on LeetCode.

    Reasons: ``right``, ``wrong``, ``no_code``, ``code_too_long``, ``failed`` (an exit code other
    than 0, which running out of memory leads to as well), ``time_limit``, ``output_limit``: that of
    the first test case that was not passed. Without a value ``no_test_cases`` (a ground truth that
    holds none) and ``sandbox_failed``.

    Raises:
        SandboxUnavailableError: when made on a machine that cannot close a sandbox, or not one
            with these limits.
    """

    limits: SandboxLimits = attrs.field(factory=SandboxLimits)
    """What one test case may use."""

    scoring: Literal["all", "share"] = attrs.field(
        default="all", validator=attrs.validators.in_(("all", "share"))
    )
    """``all``: 1 or 0, and the first test case that fails ends the grading; ``share``: the share of
    test cases that are passed, where those after the third that ran out of time are not run and
    not passed: a program that never ends would hold up the step by a time limit for each of
    hundreds. Default: the one that cannot be earned by special cases."""

    tolerance: float | None = attrs.field(
        default=None,
        validator=attrs.validators.optional([attrs.validators.gt(0.0), attrs.validators.lt(1.0)]),
    )
    """Relative and absolute difference up to which two numbers in the output are equal; None
    compares texts alone. verl's ``prime_code`` takes numpy's 1e-5 and 1e-8."""

    library_paths: tuple[Path, ...] = attrs.field(default=(), validator=_check_paths)
    """Folders of Python packages that programs may import, read-only."""

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot be closed, before a run and not in the middle of it."""
        check_sandbox()
        try:
            run_python("", stdin=b"", limits=self.limits, library_paths=self.library_paths)
        except SandboxFailedError as error:
            message = (
                f"CodeAnswer: this machine closes sandboxes, but not one with {self.limits} and "
                f"library_paths = {[str(path) for path in self.library_paths]}: {error}"
            )
            raise SandboxUnavailableError(message) from error

    def __call__(
        self, text: str, *, ground_truth: str, finish_reason: FinishReason
    ) -> RewardResult:
        """Grade `text`."""
        del finish_reason
        try:
            tests = _test_cases(ground_truth)
        except _NoTestCasesError:
            return RewardResult(value=None, reason="no_test_cases")
        code = last_program(text)
        if code is None:
            return RewardResult(value=0.0, reason="no_code")
        if len(code) > _MAX_CODE:
            return RewardResult(value=0.0, reason="code_too_long")
        passed, num_late, reason = 0, 0, "right"
        for case in tests.cases:
            try:
                verdict = self._verdict(code, case, function=tests.function)
            except SandboxFailedError:
                return RewardResult(value=None, reason="sandbox_failed")
            if verdict == "right":
                passed += 1
            elif reason == "right":
                reason = verdict
            num_late += verdict == "time_limit"
            if verdict != "right" and self.scoring == "all":
                return RewardResult(value=0.0, reason=reason)
            if num_late == _MAX_TIME_LIMITS:
                break
        return RewardResult(value=passed / len(tests.cases), reason=reason)

    def _verdict(self, code: str, case: _Case, *, function: bool) -> str:
        result = run_python(
            _CALLER if function else code,
            files={"solution.py": code} if function else {},
            stdin=case.stdin.encode(errors="replace"),
            limits=self.limits,
            library_paths=self.library_paths,
        )
        if result.ended != "itself":
            return "time_limit" if result.ended == "wall_time" else "output_limit"
        if result.exit_code != 0:
            return "time_limit" if result.exit_code == _CPU_TIME else "failed"
        compare = self._same_value if function else self._same_text
        right = any(compare(result, expected) for expected in case.expected)
        return "right" if right else "wrong"

    def _same_text(self, result: ProgramResult, expected: str) -> bool:
        got, right = _lines(result.output.decode(errors="replace")), _lines(expected)
        if got == right or self.tolerance is None:
            return got == right
        return len(got) == len(right) and all(
            len(words := line.split()) == len(others := other.split())
            and all(map(self._close, words, others))
            for line, other in zip(got, right, strict=True)
        )

    def _same_value(self, result: ProgramResult, expected: str) -> bool:
        try:
            return self._same_json(json.loads(result.output), json.loads(expected))
        except (ValueError, RecursionError):
            return False

    def _same_json(self, got: JsonValue, right: JsonValue) -> bool:
        if isinstance(got, list) and isinstance(right, list):
            return len(got) == len(right) and all(map(self._same_json, got, right))
        if isinstance(got, dict) and isinstance(right, dict):
            return got.keys() == right.keys() and all(
                self._same_json(value, right[key]) for key, value in got.items()
            )
        if isinstance(got, bool) or isinstance(right, bool):  # 1 is not true
            return got is right
        if isinstance(got, int | float) and isinstance(right, int | float):
            return got == right or (self.tolerance is not None and self._close(got, right))
        return got == right

    def _close(self, got: str | float, right: str | float) -> bool:
        if got == right:
            return True
        try:
            numbers = float(got), float(right)
        except (ValueError, OverflowError):
            return False
        tolerance = self.tolerance or 0.0
        return math.isclose(*numbers, rel_tol=tolerance, abs_tol=tolerance)


_CPU_TIME = 128 + 24
"""Ended by SIGXCPU."""


def last_program(text: str) -> str | None:
    """The last closed block of a text that is fenced as Python, or None."""
    program, lines, is_python = None, list[str](), False
    inside = False
    for line in text.split("\n"):
        fence = line.strip()
        if not inside and fence.startswith("```"):
            inside, is_python, lines = True, fence[3:].strip().lower() in _LANGUAGES, []
        elif inside and fence == "```":
            inside = False
            if is_python:
                program = "\n".join(lines) + "\n"
        elif inside:
            lines.append(line)
    return program


def _test_cases(ground_truth: str) -> _TestCases:
    try:
        tests = json.loads(ground_truth)
    except (ValueError, RecursionError) as error:
        raise _NoTestCasesError from error
    if not isinstance(tests, dict):
        raise _NoTestCasesError
    inputs, outputs, name = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or not inputs
        or len(inputs) != len(outputs)
        or not isinstance(name, str | None)
    ):
        raise _NoTestCasesError
    cases = [
        _text_case(given, right) if name is None else _call_case(name, given, right)
        for given, right in zip(inputs, outputs, strict=True)
    ]
    return _TestCases(cases=cases, function=name is not None)


def _text_case(given: object, right: object) -> _Case:
    return _Case(stdin=_as_text(given), expected=(_as_text(right),))


def _as_text(value: object) -> str:
    """A text, or a list of its lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise _NoTestCasesError
    return value


def _call_case(name: str, given: object, right: object) -> _Case:
    """Arguments and result: JSON in a string, or the values themselves."""
    try:
        arguments: list[JsonValue] = (
            [json.loads(line) for line in given.split("\n") if line.strip()]
            if isinstance(given, str)
            else _as_list(given)
        )
        expected = [json.loads(right) if isinstance(right, str) else right]
    except (ValueError, RecursionError) as error:
        raise _NoTestCasesError from error
    if isinstance(right, list) and len(right) == 1:
        expected.append(right[0])
    return _Case(
        stdin=json.dumps([name, arguments]), expected=tuple(json.dumps(value) for value in expected)
    )


def _as_list(value: object) -> list[JsonValue]:
    if not isinstance(value, list):
        raise _NoTestCasesError
    return value


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]
