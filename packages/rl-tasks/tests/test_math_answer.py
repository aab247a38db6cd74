"""Mathematical answers: 108 pairs with right answers, hostile ones, threads and conventions."""

import importlib
import json
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rl_tasks import Answer, ChatMessage, MathAnswer, Problem, grade_all, math_equality, math_pool
from rl_tasks.exact_number import exact_number
from rl_tasks.math_answer import final_answer
from rl_tasks.math_equality import answers_are_equal

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parent / "math_pairs.jsonl").read_text("utf-8").splitlines()
]


def graded(text: str, ground_truth: str, **settings: object) -> tuple[float | None, str]:
    result = MathAnswer(**settings)(text, ground_truth=ground_truth, finish_reason="stop")  # type: ignore[arg-type]
    return result.value, result.reason


@pytest.mark.slow
def test_every_pair_is_graded_right() -> None:
    """Pairs of real graders' reports: equal ones get 1, different ones 0, none fails."""
    wrong = []
    for pair in PAIRS:
        text = pair["pred"] if pair["mode"] == "response" else f"\\boxed{{{pair['pred']}}}"
        value, reason = graded(text, pair["gold"], timeout_s=60.0)
        if value != (1.0 if pair["equal"] else 0.0):
            wrong.append((pair["id"], pair["kind"], reason))
    assert wrong == []


def test_numbers_need_no_algebra() -> None:
    """Fractions, decimals, percents, thousands and mixed numbers are decided here and exactly."""
    numbers: dict[str, Fraction | int] = {
        "1{,}234": 1234,
        r"1\,234": 1234,
        r"\dfrac{1}{-2}": Fraction(-1, 2),
        r"-\frac12": Fraction(-1, 2),
        r"1 \frac{1}{4}": Fraction(5, 4),
        r"1\frac14": Fraction(5, 4),
        "-11 5/6": Fraction(-71, 6),
        r"0.1\overline{6}": Fraction(1, 6),
        r"6.02\times 10^{23}": 602 * 10**21,
        "2.": 2,
        ".5": Fraction(1, 2),
        "1e-3": Fraction(1, 1000),
    }
    for text, number in numbers.items():
        right = f"{Fraction(number).numerator}/{Fraction(number).denominator}"
        assert answers_are_equal(text, right, percent="value", needs_algebra=False), text
        wrong = f"{Fraction(number).numerator + 1}/{Fraction(number).denominator}"
        assert answers_are_equal(text, wrong, percent="value", needs_algebra=False) is False, text


@pytest.mark.parametrize(
    "text",
    ["4 10/3", "1 2", "1,23", "1/0", r"\frac{1}{0}", r"\frac{x}{2}", "12:00", "1e99999", "", "-"],
)
def test_what_is_no_number_is_not_read_as_one(text: str) -> None:
    """A mixed number with an improper part, a list, a division by zero, a power that is too big."""
    assert exact_number(text) is None


def test_a_percent_is_a_hundredth_or_also_the_number_before_it() -> None:
    """`value` takes 50% for a half alone; `either` for 50 too; 0.5% is never 50%."""
    for rule in ("either", "value"):
        assert graded(r"\boxed{50\%}", "0.5", percent=rule) == (1.0, "right")
        assert graded(r"\boxed{0.5\%}", r"50\%", percent=rule) == (0.0, "wrong")
    assert graded(r"\boxed{50\%}", "50", percent="either") == (1.0, "right")
    assert graded(r"\boxed{50\%}", "50", percent="value") == (0.0, "wrong")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{5}, no: \boxed{7}", "7"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"cut off \boxed{\frac{1}{2}", None),
        ("reasons\n#### -3\n", "-3"),
        ("#### 1\n#### 1,234", "1,234"),
        ("The total is 72 clips, altogether.", "72"),
        ("It costs $1,000.", "$1,000"),
        ("at 12:00, in 2/3 of v1.2", None),
        ("", None),
    ],
)
def test_which_part_is_the_answer(text: str, answer: str | None) -> None:
    """The last complete box; without a box a GSM8K line; else the last number that stands alone."""
    assert final_answer(text) == answer


@pytest.mark.parametrize("text", ["1e5000", r"7\times 10^{9999}", "1e-5000", r"-3\cdot 10^{4300}"])
def test_a_number_of_many_digits_is_compared_and_not_written_out(text: str) -> None:
    """Python refuses to write an integer of more than 4300 digits; that ended the run."""
    assert graded(rf"\boxed{{{text}}}", r"\sqrt{2}") == (0.0, "wrong")
    assert graded(rf"\boxed{{{text}}}", text) == (1.0, "right")
    assert graded(r"\boxed{\sqrt{2}}", text) == (0.0, "wrong")


@pytest.mark.slow
def test_a_number_of_many_digits_is_no_error_of_the_algebra_system() -> None:
    """Where an algebra system is asked, it gets the number as it was written."""
    assert graded(r"\boxed{7\times 10^{9999}}", "x+1", timeout_s=60.0) == (0.0, "wrong")


@pytest.mark.slow
def test_a_hostile_answer_ends_in_time_and_harms_nobody(tmp_path: Path) -> None:
    """A tower of powers is cut off, code is text, and the next answers are graded as before."""
    witness = tmp_path / "pwned"
    code = f"__import__('os').system('touch {witness}')"
    for text in (rf"\boxed{{{code}}}", rf"\boxed{{\begin{{pmatrix}} {code} \end{{pmatrix}}}}"):
        assert graded(text, "x+1")[0] in {0.0, None}
    assert not witness.exists()
    value, reason = graded(r"\boxed{9^{9^{9^{9}}} + \sqrt{2}}", r"\sqrt{2}", timeout_s=0.5)
    assert value is None
    assert reason in {"timed_out", "grader_died", "grader_failed_MemoryError"}
    assert graded(r"\boxed{\sqrt[3]{16}}", r"2\sqrt[3]{2}", timeout_s=60.0) == (1.0, "right")


def test_a_cube_root_needs_algebra() -> None:
    """The tests of workers grade such answers; one that is decided here would test nothing."""
    texts = (r"\sqrt[3]{16}", r"2\sqrt[3]{2}")
    assert answers_are_equal(*texts, percent="either", needs_algebra=False) is None


def test_grading_works_in_a_thread_that_is_not_the_main_one() -> None:
    """A34: a time-out by signal raises there, and every answer then scores 0."""
    results: list[tuple[float | None, str]] = []
    thread = threading.Thread(
        target=lambda: results.append(
            graded(r"\boxed{\sqrt[3]{16}}", r"2\sqrt[3]{2}", timeout_s=60.0)
        )
    )
    thread.start()
    thread.join(timeout=120)
    assert results == [(1.0, "right")]


def test_a_script_without_a_guard_can_grade(tmp_path: Path) -> None:
    """The caller's main module is not run again in the workers, whatever stands in it."""
    script = tmp_path / "train.py"
    script.write_text(
        "print('started')\n"
        "from rl_tasks import MathAnswer\n"
        "answer = MathAnswer(timeout_s=60.0)(\n"
        "    r'\\boxed{\\sqrt[3]{16}}', ground_truth=r'2\\sqrt[3]{2}', finish_reason='stop')\n"
        "print(answer.reason)\n"
    )
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True
    )
    assert (result.stdout, result.stderr) == ("started\nright\n", "")


def test_what_happens_around_a_grader_does_not_disturb_it(tmp_path: Path) -> None:
    """A module of a library's name in the current folder; a Ctrl-C that the run survives; a fork.

    At the fork the locks are held, as by threads that wait for a comparison.
    """
    (tmp_path / "queue.py").write_text("raise RuntimeError\n")
    program = """
import os, signal, threading
from rl_tasks import MathAnswer, math_pool
signal.signal(signal.SIGINT, lambda *_: None)
def grade(answer):
    reward = MathAnswer(timeout_s=60.0)
    return reward(answer, ground_truth="2\\\\sqrt[3]{2}", finish_reason="stop").reason
reasons = [grade("\\\\boxed{\\\\sqrt[3]{16}}")]
os.killpg(0, signal.SIGINT)
reasons.append(grade("\\\\boxed{\\\\sqrt[3]{7}}"))
for lock in math_pool._LOCKS:
    lock.acquire()
child = os.fork()
if child == 0:
    signal.alarm(120)
    os._exit(0 if grade("\\\\boxed{\\\\sqrt[3]{16}}") == "right" else 1)
print(*reasons, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (result.stdout, result.stderr) == ("right wrong 0\n", "")


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced() -> None:
    """What it was comparing has no value; the next answer gets a worker of its own."""
    pool = math_pool._Pool(1)
    request: dict[str, str | float] = {
        "answer": r"\sqrt[3]{16}",
        "ground_truth": r"2\sqrt[3]{2}",
        "percent": "either",
        "timeout_s": 60.0,
    }
    try:
        assert pool.ask(request, timeout_s=60.0) == {"equal": True}
        (worker,) = pool._workers
        worker._process.kill()
        worker._process.wait()
        with pytest.raises(math_pool.WorkerDiedError):
            pool.ask(request, timeout_s=60.0)
        assert pool.ask(request, timeout_s=60.0) == {"equal": True}
        assert len(pool._workers) == 1
        with pytest.raises(TimeoutError):
            pool.ask({**request, "answer": "9^{9^{9^{9}}}+\\sqrt{2}"}, timeout_s=0.05)
        assert pool._workers == []
    finally:
        pool.end()


def test_many_answers_at_once_are_graded_as_one_by_one() -> None:
    """Threads change the time and not the results, nor their order."""
    problem = Problem(
        problem_id="p",
        messages=(ChatMessage(role="user", content="?"),),
        ground_truth=r"2\sqrt[3]{2}",
        data_source="math",
    )
    texts = [r"\boxed{\sqrt[3]{16}}", r"\boxed{3}", "none", r"\boxed{2\cdot\sqrt[3]{2}}"] * 5
    answers = [Answer(problem=problem, text=text, finish_reason="stop") for text in texts]
    results = grade_all({"math": MathAnswer(timeout_s=60.0)}, answers, num_threads=4)
    assert [result.value for result in results] == [1.0, 0.0, 0.0, 1.0] * 5


def test_an_endless_answer_is_not_read() -> None:
    """3000 characters are no answer that a data set has; they score 0 and say why."""
    assert graded(rf"\boxed{{{'1+' * 1500}1}}", "1501") == (0.0, "answer_too_long")
    assert graded("I do not know.", "1") == (0.0, "no_answer")


def test_no_answer_reaches_sympys_evaluating_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """A35: math-verify's reader of plain expressions may evaluate the text; it is never asked."""
    math_verify = importlib.import_module("math_verify")
    real, readers = math_verify.parse, []

    def parse(text: str, **settings: Any) -> object:  # noqa: ANN401
        readers.append([type(reader).__name__ for reader in settings["extraction_config"]])
        return real(text, **settings)

    monkeypatch.setattr(math_verify, "parse", parse)
    math_equality._parsed.cache_clear()
    for answer in ("x+1", "(2)*(x)", "__import__('os').getcwd()"):
        answers_are_equal(answer, r"\sqrt{2}", percent="either", needs_algebra=True)
    assert readers == [["LatexExtractionConfig"]] * 4
