"""Processes that are killed in the middle of a run, with real Ray and real vLLM."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rl_metrics import StepRecord, read_metrics

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ONE_RANK = "grpo_trainer/run_qwen3_1_7b_fsdp.py"
TWO_RANKS = "gspo_trainer/run_qwen3_32b_fsdp.py"
NUM_STEPS = 40
DEADLINE_S = 600.0

pytestmark = pytest.mark.slow


def below(process: psutil.Process) -> Iterator[psutil.Process]:
    """Everything that runs below a process."""
    with_names = process.children(recursive=True)
    yield from (child for child in with_names if child.is_running())


def named(name: str) -> Callable[[psutil.Process], list[psutil.Process]]:
    """Those of the processes below whose title begins so."""

    def find(process: psutil.Process) -> list[psutil.Process]:
        found = []
        for child in below(process):
            try:
                title = " ".join(child.cmdline())
            except psutil.NoSuchProcess:
                continue
            if title.startswith(name):
                found.append(child)
        return found

    return find


def wait_for(condition: Callable[[], bool], run: "subprocess.Popen[str]", what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert run.poll() is None, f"the run ended before {what}: {run.communicate()[0]}"
        assert time.monotonic() < deadline, f"no {what} within {DEADLINE_S} s"
        time.sleep(0.05)


def steps_in(folder: Path) -> int:
    files = list(folder.glob("*/metrics.jsonl"))
    return files[0].read_text(encoding="utf-8").count("\n") if files else 0


@contextlib.contextmanager
def running(recipe: str, folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A tiny run in turn, and nothing of it afterwards."""
    with subprocess.Popen(
        [
            *(sys.executable, str(EXAMPLES / recipe), "--size", "tiny", "--sync"),
            *(f"run.folder={folder}", f"loop.num_steps={NUM_STEPS}", "loop.evaluate_every=20"),
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
    ) as run:
        try:
            yield run
        finally:
            run.kill()


def check_every_step_once(folder: Path) -> list[StepRecord]:
    """Each step with all of its groups, in the order of the versions, on the newest weights."""
    records = read_metrics(folder / "metrics.jsonl")
    assert [record.step for record in records] == list(range(NUM_STEPS + 1))
    for record in records[1:]:
        assert record.values["batch/sampled/sequences"] == 16 * 8
        assert record.values["policy/version/value"] == record.step
        assert record.values["staleness/trajectory/max"] == 0
        assert record.values["mismatch/logprob/mean"] < 1e-4
    return records


def test_samplers_and_a_grader_die_and_no_prompt_is_lost(tmp_path: Path) -> None:
    """A sampler's process, the grader, and an engine are killed; the run ends as it should.

    The terminal says who died. A sampler that came back had the newest weights, or its logprobs
    would be nats away from the trainer's.
    """
    with running(
        ONE_RANK, tmp_path, "num_samplers=2", "run.graders=1", "run.checkpoint_every=40"
    ) as run:
        me = psutil.Process(run.pid)
        wait_for(lambda: steps_in(tmp_path) >= 4, run, "step 3")
        hosts = named("ray::SamplerHost")(me)
        assert len(hosts) == 2
        hosts[0].send_signal(signal.SIGKILL)
        (grader,) = named("ray::Grader")(me)
        grader.send_signal(signal.SIGKILL)
        before = steps_in(tmp_path)
        wait_for(lambda: steps_in(tmp_path) >= before + 3, run, "steps of the one that is left")
        wait_for(lambda: len(named("ray::SamplerHost")(me)) == 2, run, "another sampler")
        named("VLLM::EngineCore")(me)[0].send_signal(signal.SIGKILL)
        output, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 0, output
    (folder,) = tmp_path.iterdir()
    records = check_every_step_once(folder)
    assert output.count("a sampler is replaced, its requests are drawn again") >= 2
    # the grader may have had nothing in hand: then nothing was lost with it
    lost_with_grader = output.count("a grader is replaced, its answers are graded again")
    restarted = sum(record.values["workers/restarted/count"] for record in records[1:])
    assert restarted >= 2 + lost_with_grader


def test_a_trainer_rank_dies_and_the_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """One of two ranks is killed; the run says which, begins again at its checkpoint, and ends."""
    with running(TWO_RANKS, tmp_path, "run.checkpoint_every=5", "run.max_restarts=1") as run:
        me = psutil.Process(run.pid)
        wait_for(lambda: steps_in(tmp_path) >= 8, run, "step 7")
        ranks = named("ray::TrainerRank")(me)
        assert len(ranks) == 2
        ranks[1].send_signal(signal.SIGKILL)  # of either rank: nothing tells processes apart
        output, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 0, output
    (folder,) = tmp_path.iterdir()
    check_every_step_once(folder)
    assert re.findall(r"actor 'trainer rank (\d)': its process died", output) in (["0"], ["1"])
    assert "(restart 1 of 1)" in output
