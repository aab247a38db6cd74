"""Graded answers per second on two cores, by reward.

Each line grades completions of some hundred characters through `rl_tasks.grade_all`, as a training
step does: groups of 16 samples for one prompt. The target is 2,000 answers per second. Workers
have met other answers of every kind before, as they have after the first steps of a run.

    plain rewards     LastNumber, ExactMatch in a box, a weighted sum: one thread
    integers          MathAnswer on answers such as DAPO-Math's and AIME's
    MATH-like         MathAnswer; one problem in eight has an answer that needs algebra, and each of
                      its wrong samples is one of four different ones
    pairs, grouped    MathAnswer on the collected hard pairs, each 16 times
    pairs, cold       the same, once each: nothing is remembered, four in ten need algebra
    roots, cold       MathAnswer on numbers with square roots, each of which is seen once
    code              CodeAnswer, one test case in one sandbox for each answer; a program that
                      reads and prints, and a function

    ./run benchmarks/grading.py --output benchmarks/results/grading.json
"""

import argparse
import functools
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rl_tasks import (
    Answer,
    ChatMessage,
    CodeAnswer,
    ExactMatch,
    LastBox,
    LastNumber,
    MathAnswer,
    Problem,
    Reward,
    SandboxUnavailableError,
    TaggedSections,
    WeightedSum,
    grade_all,
    summarise,
)

PAIRS = Path(__file__).parents[1] / "packages/rl-tasks/tests/math_pairs.jsonl"
TARGET = 2_000
"""Answers per second."""

REPEATS = 5
"""Of which the median counts."""

GROUP = 16
FILLER = "We set up the equation, simplify both sides, and check the result once more. " * 4

Case = tuple[str, Mapping[str, Reward], Callable[[], list[Answer]], int]


def problem(ground_truth: str) -> Problem:
    """A problem of which only the ground truth matters."""
    return Problem(
        problem_id="p",
        messages=(ChatMessage(role="user", content="?"),),
        ground_truth=ground_truth,
        data_source="bench",
    )


def answer(ground_truth: str, written: str) -> Answer:
    """A completion of usual length with an answer at its end."""
    return Answer(problem=problem(ground_truth), text=FILLER + written, finish_reason="stop")


def integers(count: int) -> list[Answer]:
    """Half of the samples are right."""
    drawn = random.Random(0)  # noqa: S311 - no secret
    answers = []
    for _ in range(count // GROUP):
        right = drawn.randrange(1000)
        for _ in range(GROUP):
            got = right if drawn.random() < 0.5 else drawn.randrange(1000)  # noqa: PLR2004
            answers.append(answer(str(right), f"Therefore the answer is \\boxed{{{got}}}."))
    return answers


def math_like(count: int) -> list[Answer]:
    """One group in eight needs algebra."""
    drawn = random.Random(1)  # noqa: S311 - no secret
    answers = []
    for group in range(count // GROUP):
        if group % 8:
            answers += integers(GROUP)
            continue
        a, b = drawn.randrange(2, 10_000), drawn.randrange(2, 10_000)
        right = f"\\frac{{{a}+\\sqrt{{{b}}}}}{{2}}"
        forms = [f"\\frac{{{a}}}{{2}}+\\frac{{\\sqrt{{{b}}}}}{{2}}", right]
        forms += [f"\\frac{{{a + k}+\\sqrt{{{b}}}}}{{2}}" for k in range(1, 5)]
        answers += [answer(right, f"\\boxed{{{drawn.choice(forms)}}}") for _ in range(GROUP)]
    return answers


def pairs() -> Iterator[Answer]:
    """Each collected pair once."""
    for line in PAIRS.read_text(encoding="utf-8").splitlines():
        pair = json.loads(line)
        boxed = pair["pred"] if pair["mode"] == "response" else f"\\boxed{{{pair['pred']}}}"
        yield answer(pair["gold"], boxed)


def grouped_pairs() -> list[Answer]:
    """Each collected pair 16 times."""
    return [one for one in pairs() for _ in range(GROUP)]


def roots(count: int) -> list[Answer]:
    """Half of them are right, written in another way; no two are equal."""
    answers = []
    for number in range(2, count + 2):
        right = f"\\frac{{{number}+\\sqrt{{{number**2 + 1}}}}}{{2}}"
        got = f"\\frac{{{number}}}{{2}}+\\frac{{\\sqrt{{{number**2 + 1 + number % 2}}}}}{{2}}"
        answers.append(answer(right, f"\\boxed{{{got}}}"))
    return answers


def functions(count: int) -> list[Answer]:
    """Equal functions, each called by itself."""
    tests = json.dumps({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"})
    text = "```python\ndef add(a: int, b: int) -> int:\n    return a + b\n```"
    return [Answer(problem=problem(tests), text=text, finish_reason="stop") for _ in range(count)]


def programs(count: int) -> list[Answer]:
    """Equal programs, each run by itself."""
    tests = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
    text = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    return [Answer(problem=problem(tests), text=text, finish_reason="stop") for _ in range(count)]


def cases() -> list[Case]:
    """Name, rewards, what makes the answers, threads."""
    tagged = WeightedSum(parts=((1.0, LastBox()), (0.1, TaggedSections())))
    algebra: Mapping[str, Reward] = {"bench": MathAnswer()}
    listed: list[Case] = [
        ("LastNumber", {"bench": LastNumber()}, functools.partial(integers, 16_000), 1),
        (
            "ExactMatch in LastBox",
            {"bench": LastBox(inner=ExactMatch())},
            functools.partial(integers, 16_000),
            1,
        ),
        ("WeightedSum", {"bench": tagged}, functools.partial(integers, 16_000), 1),
        ("MathAnswer, integers", algebra, functools.partial(integers, 16_000), 1),
        ("MathAnswer, MATH-like", algebra, functools.partial(math_like, 16_000), 8),
        ("MathAnswer, pairs, grouped", algebra, grouped_pairs, 8),
        ("MathAnswer, pairs, cold", algebra, lambda: list(pairs()), 8),
        ("MathAnswer, roots, cold", algebra, functools.partial(roots, 400), 8),
    ]
    try:
        code: Mapping[str, Reward] = {"bench": CodeAnswer()}
        listed += [
            ("CodeAnswer", code, functools.partial(programs, 400), 4),
            ("CodeAnswer, functions", code, functools.partial(functions, 400), 4),
        ]
    except SandboxUnavailableError as error:
        print(f"CodeAnswer left out: {error}", file=sys.stderr)
    return listed


KINDS = (
    (r"\sqrt{{{a}}}", r"{b}\sqrt{{{c}}}"),
    (r"[{a},{b})", r"({a},{b}]"),
    (r"({a}, \frac{{{b}\pi}}{{{c}}})", r"\left( {a}, \frac{{\pi}}{{{c}}} \right)"),
    (r"(x-{a})(x+{a})", r"x^2-{b}"),
    (r"y = -\frac{{1}}{{{a}}}x + \frac{{{b}}}{{{c}}}", r"{a}x+{b}y-{c}=0"),
    (r"\sin\left(\frac{{\pi}}{{{a}}}\right)", r"\frac{{1}}{{{b}}}"),
    (r"\log_{{{a}}} {b}", r"{c}"),
    (r"\binom{{{a}}}{{{b}}}", r"{c}!"),
    (r"\{{{a}, {b}\}}", r"\{{{b}, {c}\}}"),
    (
        r"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}",
        r"\begin{{pmatrix}} {a} \\ {c} \end{{pmatrix}}",
    ),
    (r"|{a}-{b}|", r"{c}+e^{{{a}}}"),
    (r"({a},{b})\cup({b},{c})", r"x<{a}"),
    (r"{a} + {b}i", r"{a} - {c}i"),
)
"""Pairs of kinds that the workers have met before, with other numbers."""


def warm_up() -> None:
    """Both workers run, and have met every kind of answer, as after the first steps of a run."""
    drawn = random.Random(2)  # noqa: S311 - no secret
    answers = []
    for _ in range(12):
        for got, right in KINDS:
            a, b, c = (drawn.randrange(2, 99) for _ in range(3))
            numbers = {"a": a, "b": b, "c": c}
            answers.append(answer(right.format(**numbers), f"\\boxed{{{got.format(**numbers)}}}"))
    grade_all({"bench": MathAnswer(timeout_s=300.0)}, answers, num_threads=8)


def measure(name: str) -> dict[str, str | int | float]:
    """Grade one case, once, in a process that remembers nothing."""
    (_, rewards, make, num_threads) = next(case for case in cases() if case[0] == name)
    answers = make()
    if "MathAnswer" in name:
        warm_up()
    start = time.perf_counter()
    results = grade_all(rewards, answers, num_threads=num_threads)
    seconds = time.perf_counter() - start
    summary = summarise(results)
    return {
        "reward": name,
        "answers": len(answers),
        "threads": num_threads,
        "seconds": round(seconds, 4),
        "answers_per_s": round(len(answers) / seconds, 1),
        "of_target": round(len(answers) / seconds / TARGET, 3),
        "mean": round(summary.mean or 0.0, 3),
        "not_graded": summary.num_unscorable,
    }


def median_of_runs(name: str) -> dict[str, object]:
    """The middle one of some runs, each in a process of its own."""
    runs = []
    for _ in range(REPEATS):
        command = [sys.executable, __file__, "--only", name]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        runs.append(json.loads(run.stdout))
    runs.sort(key=lambda run: float(run["answers_per_s"]))
    middle: dict[str, object] = runs[REPEATS // 2]
    print(
        f"{name:28} {middle['answers']:6} answers {middle['answers_per_s']:10}/s "
        f"{middle['of_target']:8} of the target  mean {middle['mean']}  "
        f"not graded {middle['not_graded']}",
        flush=True,
    )
    return {**middle, "all_answers_per_s": [run["answers_per_s"] for run in runs]}


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", help="one case, once, as JSON")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only)))
        return
    load = os.getloadavg()[0]
    lines = [median_of_runs(name) for name, *_ in cases()]
    if arguments.output:
        report = {
            "target_answers_per_s": TARGET,
            "cores": len(os.sched_getaffinity(0)),
            "load_before": round(load, 2),
            "python": platform.python_version(),
            "lines": lines,
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
