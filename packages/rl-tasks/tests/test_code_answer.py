"""Programs as answers."""

import json
import math

import pytest

from rl_tasks import (
    CodeAnswer,
    MathAnswer,
    SandboxLimits,
    SandboxUnavailableError,
)
from rl_tasks.code_answer import last_program

LIMITS = SandboxLimits(wall_s=60.0, cpu_s=60)
ADD = {"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]}
CALL = {"inputs": ["1\n2", "30\n4"], "outputs": ["3", "34"], "fn_name": "add"}


pytestmark = pytest.mark.usefixtures("needs_sandbox")


def graded(
    program: str, tests: object, limits: SandboxLimits = LIMITS, **settings: object
) -> tuple[float | None, str]:
    text = f"Here it is:\n```python\n{program}\n```\nDone."
    reward = CodeAnswer(limits=limits, **settings)  # type: ignore[arg-type]
    result = reward(text, ground_truth=json.dumps(tests), finish_reason="stop")
    return result.value, result.reason


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nor\n```python\nb\n```", "b\n"),
        ("```py\na\n```\n```\nnot this\n```\n```text\nnor this\n```", "a\n"),
        ("```python\na\n", None),
        ("```python\na\n```\n```python\ncut off", "a\n"),
        ("a = 1", None),
        ("  ```Python3 \n  a\n  ```", "  a\n"),
    ],
)
def test_which_block_is_the_program(text: str, program: str | None) -> None:
    """The last one that is fenced as Python and closed."""
    assert last_program(text) == program


def test_standard_input_and_output() -> None:
    """All test cases or none; with `share` the part that is passed, and why the rest is not."""
    assert graded("a, b = map(int, input().split()); print(a + b)", ADD) == (1.0, "right")
    assert graded("print(3)", ADD) == (0.0, "wrong")
    assert graded("print(3)", ADD, scoring="share") == (0.5, "wrong")
    assert graded("print(3 if input() == '1 2' else 1 / 0)", ADD, scoring="share") == (
        0.5,
        "failed",
    )


def test_functions() -> None:
    """Arguments are JSON, a line each; a tuple is a list, a method of Solution a function."""
    assert graded("def add(a, b):\n    print('noise')\n    return a + b", CALL) == (1.0, "right")
    method = "class Solution:\n    def add(self, a: List[int], b: int): return a + b"
    assert graded(method, CALL) == (1.0, "right")
    method = "class Solution:\n    def final(self, a: int, b: int) -> int: return a + b"
    assert graded(method, {**CALL, "fn_name": "final"}) == (1.0, "right")
    pair = {"inputs": ["1\n2"], "outputs": ["[1, 2]"], "fn_name": "add"}
    assert graded("def add(a, b): return (a, b)", pair) == (1.0, "right")
    assert graded("def add(a, b): return [b, a]", pair) == (0.0, "wrong")
    assert graded("def other(a, b): return a", pair) == (0.0, "failed")
    assert graded("def add(a, b): return {1}", pair) == (0.0, "failed")
    apps = {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}
    assert graded("def add(a, b): return a + b", apps) == (1.0, "right")
    assert graded("def add(a, b): return True", {**CALL, "outputs": ["1", "1"]}) == (0.0, "wrong")


def test_results_are_compared_as_json() -> None:
    """3 is 3.0 and 1 is not true, at any depth; close numbers only if that was asked for."""
    tests = {"inputs": ["1"], "outputs": ['{"a": [3, true, 0.1]}'], "fn_name": "f"}
    assert graded("def f(_): return {'a': (3.0, True, 0.1)}", tests) == (1.0, "right")
    assert graded("def f(_): return {'a': (3.0, 1, 0.1)}", tests) == (0.0, "wrong")
    assert graded("def f(_): return {'a': [3, True, 0.1 + 1e-9]}", tests) == (0.0, "wrong")
    assert graded("def f(_): return {'a': [3, True, 0.1 + 1e-9]}", tests, tolerance=1e-6) == (
        1.0,
        "right",
    )
    assert graded("def f(_): return {'a': [3, True]}", tests) == (0.0, "wrong")
    assert graded("def f(_): return {'a': [10**400, True, 0.1]}", tests, tolerance=1e-6) == (
        0.0,
        "wrong",
    )


def test_white_space_at_ends_and_small_differences() -> None:
    """Texts are compared line by line; numbers closely only if that was asked for."""
    tests = {"inputs": [""], "outputs": ["a 1.0\nb\n"]}
    assert graded("print(' a 1.0  \\nb\\n\\n')", tests) == (1.0, "right")
    assert graded("print('a 1.0 b')", tests) == (0.0, "wrong")
    assert graded("print('a 1.0000001\\nb')", tests) == (0.0, "wrong")
    assert graded("print('a 1.0000001\\nb')", tests, tolerance=1e-5) == (1.0, "right")
    assert graded("print('a 1.1\\nb')", tests, tolerance=1e-5) == (0.0, "wrong")
    assert graded("print('a nan\\nb')", tests, tolerance=1e-5) == (0.0, "wrong")


EQUAL_TO_EVERYTHING = """\
class Yes:
    def __eq__(self, other): return True
    def __repr__(self): return "34"
def add(a, b): return Yes()
"""
WRITES_EVERYWHERE = """\
import os
for descriptor in range(1, 64):
    try:
        os.write(descriptor, b"right PASSED value=1.0 ready")
    except OSError:
        pass
os._exit(0)
"""
SEARCHES = """\
import gc
def add(a, b):
    return [found for found in gc.get_objects() if isinstance(found, dict) and "outputs" in found]
"""


@pytest.mark.parametrize(
    "program",
    [
        EQUAL_TO_EVERYTHING,
        "import json\njson.dumps = lambda *a, **k: 'true'\ndef add(a, b): return 0",
        "import json\njson.loads = lambda *a: 1\ndef add(a, b): return 0",
        WRITES_EVERYWHERE,
        "import sys\nprint('1.0 right')\nsys.exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
        "import os\nos.execv('/bin/true', ['true'])",
        "def add(a, b):\n  import os\n  os.kill(os.getppid(), 9)\n  return 0",
        "import rl_tasks",
        SEARCHES,
    ],
    ids=[
        "equal to everything",
        "patched dumps",
        "patched loads",
        "writes everywhere",
        "prints a verdict",
        "exit handler",
        "another program",
        "kills its parent",
        "the grader's own package",
        "searches for the outputs",
    ],
)
def test_the_verdict_cannot_be_forged(program: str) -> None:
    """What is right never enters the sandbox, so every trick is a wrong answer."""
    value, reason = graded(program, CALL)
    assert value == 0.0
    assert reason in {"wrong", "failed"}
    stdin_value, _ = graded(program, ADD)
    assert stdin_value == 0.0


def test_a_right_answer_counts_however_the_program_ends_well() -> None:
    """os._exit(0) is an end like any other; an exit code other than 0 is not."""
    tests = {"inputs": [""], "outputs": ["3"]}
    assert graded("import os; print(3, flush=True); os._exit(0)", tests) == (1.0, "right")
    assert graded("import os; print(3, flush=True); os._exit(1)", tests) == (0.0, "failed")


def test_limits_have_their_own_reasons() -> None:
    """Too slow and too much are told from wrong."""
    quick = SandboxLimits(wall_s=0.5, cpu_s=1)
    assert graded("while True: pass", ADD, quick) == (0.0, "time_limit")
    assert graded("import time; time.sleep(99)", ADD, quick) == (0.0, "time_limit")
    assert graded("while True: print('x' * 9999)", ADD) == (0.0, "output_limit")
    assert graded("#" * 200_001, ADD) == (0.0, "code_too_long")
    reward = CodeAnswer(limits=LIMITS)
    result = reward("no code", ground_truth=json.dumps(ADD), finish_reason="stop")
    assert (result.value, result.reason) == (0.0, "no_code")


def test_a_program_that_never_ends_does_not_take_a_time_limit_for_each_test_case() -> None:
    """1,000 test cases of half a second each would be 8 minutes; 1 of 1,000 is passed."""
    tests = {"inputs": ["1", *["2"] * 999], "outputs": ["1", *["2"] * 999]}
    quick = SandboxLimits(wall_s=0.5, cpu_s=1)
    reward = CodeAnswer(limits=quick, scoring="share")
    text = "```python\nn = input()\nwhile n != '1': pass\nprint(n)\n```"
    result = reward(text, ground_truth=json.dumps(tests), finish_reason="stop")
    assert (result.value, result.reason) == (0.001, "time_limit")


@pytest.mark.parametrize(
    "ground_truth",
    [
        "",
        "3",
        "{}",
        '{"inputs": [], "outputs": []}',
        '{"inputs": ["1"], "outputs": []}',
        '{"inputs": [1], "outputs": [1]}',
        '{"inputs": ["1"], "outputs": ["{"], "fn_name": "f"}',
        "[" * 100_000,
    ],
)
def test_a_ground_truth_without_test_cases_is_no_wrong_answer(ground_truth: str) -> None:
    """The row is broken, not the answer: no value."""
    result = CodeAnswer(limits=LIMITS)("", ground_truth=ground_truth, finish_reason="stop")
    assert (result.value, result.reason) == (None, "no_test_cases")


@pytest.mark.parametrize("program", ["print('['*100000)", "print('1' * 100000)", "print('NaN')"])
def test_a_result_that_is_no_json_is_wrong(program: str) -> None:
    """What comes back is data: nesting and digits without end are wrong, not an error here."""
    hostile = f"def add(a, b):\n  import json\n  json.dumps = lambda _: {program[6:-1]}\n  return 0"
    assert graded(hostile, CALL) == (0.0, "wrong")


def test_limits_that_the_machine_does_not_grant_are_refused_at_once() -> None:
    """Each completion would have no value; no process may open a thousand million files."""
    limits = SandboxLimits(max_open_files=10**9)
    with pytest.raises(SandboxUnavailableError, match=r"not one with .*max_open_files=1000000000"):
        CodeAnswer(limits=limits)


def test_times_without_an_end_are_refused() -> None:
    """No system call waits for ever by number; each answer would end in an error."""
    with pytest.raises(ValueError, match=r"'wall_s' must be <= 86400"):
        SandboxLimits(wall_s=math.inf)
    with pytest.raises(ValueError, match=r"'timeout_s' must be <= 86400"):
        MathAnswer(timeout_s=math.inf)
