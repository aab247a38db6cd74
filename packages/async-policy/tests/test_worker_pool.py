"""Real Ray, real kills: every prompt once, in the same order as without the fault."""

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from async_policy import CheckpointStore, JsonValue, PoolLimits, read_json

DRIVER = Path(__file__).with_name("pool_driver.py")
LIMIT_S = 300.0
FAULTS = ("killed 0", "killed 1", "stalled", "elastic")


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, JsonValue]:
    """What one driver saw of each fault."""
    path = tmp_path_factory.mktemp("pool") / "report.json"
    finished = subprocess.run(
        [sys.executable, str(DRIVER), "everything", str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(),
    )
    assert finished.returncode == 0, finished.stderr
    report = read_json(path)
    assert isinstance(report, Mapping)
    return report


def run_of(seen: Mapping[str, JsonValue], name: str) -> Mapping[str, JsonValue]:
    run = seen[name]
    assert isinstance(run, Mapping)
    return run


def numbers(value: JsonValue) -> list[int]:
    """All numbers of a list of lists."""
    assert isinstance(value, list)
    found: list[int] = []
    for part in value:
        found += numbers(part) if isinstance(part, list) else [part]
    return found


def log_lines(seen: Mapping[str, JsonValue]) -> list[str]:
    log = seen["log"]
    assert isinstance(log, list)
    return [str(line) for line in log]


@pytest.mark.slow
def test_undisturbed_run_sets_groups_aside(seen: Mapping[str, JsonValue]) -> None:
    """The reference: ten steps of four groups, a dozen set aside, every prompt once."""
    run = run_of(seen, "undisturbed")
    consumed = [*numbers(run["steps"]), *numbers(run["set aside"])]
    assert len(numbers(run["steps"])) == 40
    assert len(consumed) > 45
    assert sorted(consumed) == list(range(len(consumed)))
    assert (run["redone"], run["lost"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_same_order_as_without_the_fault(seen: Mapping[str, JsonValue], fault: str) -> None:
    """Each prompt once, none mixed up with another, versions rise, staleness within its bound."""
    run, calm = run_of(seen, fault), run_of(seen, "undisturbed")
    assert run["steps"] == calm["steps"]
    assert run["set aside"] == calm["set aside"]
    assert run["mixed"] == []
    assert run["published"] == list(range(11))
    assert max(numbers(run["staleness"])) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_workers_are_replaced_and_named(seen: Mapping[str, JsonValue], seed: int) -> None:
    """The log names who died, what was redone and how often it was replaced."""
    run = run_of(seen, f"killed {seed}")
    kills, redone = run["kills"], run["redone"]
    assert isinstance(kills, int)
    assert isinstance(redone, int)
    assert kills >= 3
    worker = rf"mortal-{seed}-\d"
    died = [line for line in log_lines(seen) if re.match(rf"WARNING worker '{worker}'", line)]
    assert 1 <= len(died) <= kills
    assert all(re.search(r"is replaced \(restart \d of 20\): actor .*its process", d) for d in died)
    again = [
        line
        for line in log_lines(seen)
        if re.match(rf"WARNING sampling group \d+ .* is redone, .* worker '{worker}'", line)
    ]
    # the last ones may belong to groups that the run did not wait for
    assert len(again) >= redone > 0


@pytest.mark.slow
def test_stalled_worker_is_relieved_at_its_deadline(seen: Mapping[str, JsonValue]) -> None:
    """SIGSTOP in the middle of group 9: others sample it, the stopped process is ended."""
    run = run_of(seen, "stalled")
    assert run["victim there"] is False
    relieved = r"WARNING sampling group 9 \(step 2\) is redone, .* with worker 'still-\d'"
    lines = [line for line in log_lines(seen) if re.match(relieved, line)]
    assert len(lines) == 1
    assert lines[0].endswith("it did not answer within 1 s (limit: call_s)")


@pytest.mark.slow
def test_workers_join_and_leave_while_the_run_goes_on(seen: Mapping[str, JsonValue]) -> None:
    """Three processes sampled, the last steps without the one that left; nothing was lost."""
    run = run_of(seen, "elastic")
    late = run["late"]
    assert isinstance(late, list)
    assert run["first"] not in late
    assert len(numbers(run["processes"])) == 3
    assert run["lost"] == 0
    assert run["status"] == [["second", "serving", 10, 0], ["third", "serving", 10, 0]]


@pytest.mark.slow
def test_a_pool_without_hope_is_an_error_that_says_why(seen: Mapping[str, JsonValue]) -> None:
    """A constructor that raises, a mistake of the caller's, and a last worker that is dead."""
    assert seen["broken"] == (
        "WorkerPoolError: workers cannot join: 'broken-0' after 1 restarts: actor 'broken-0': "
        "its constructor raised OSError: no such model"
    )
    assert seen["mistaken"] == (
        "WorkerPoolError: workers cannot join: 'mistaken-0' after 0 restarts: "
        "KeyError('mistaken-0')"
    )
    assert str(seen["all dead"]).startswith(
        "WorkerPoolError: no worker is left for the weights of version 0: 'only' after 0 restarts: "
        "actor 'only': its process died"
    )


@pytest.mark.slow
def test_killed_driver_goes_on_from_its_checkpoint(
    tmp_path: Path, seen: Mapping[str, JsonValue]
) -> None:
    """kill -9 of the driver, twice, at random moments: the same steps, none twice, none missing."""
    chance = random.Random(0)  # noqa: S311 -- no secret
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder, keep=1)
    command = [sys.executable, str(DRIVER), "resumable", str(folder)]
    for least in (2, 5):
        with subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL) as driver:
            deadline = time.monotonic() + LIMIT_S
            while driver.poll() is None and time.monotonic() < deadline:
                latest = store.latest()
                if latest is not None and latest.step >= least:
                    break
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.1))
            driver.kill()
    subprocess.run(command, env=environment(), check=True, timeout=LIMIT_S)
    latest = store.latest()
    assert latest is not None
    saved = read_json(latest.path / "run.json")
    assert isinstance(saved, dict)
    calm = run_of(seen, "undisturbed")
    assert [step[0] for step in saved["consumed"]] == calm["steps"]
    assert [step[1] for step in saved["consumed"]] == calm["set aside"]
    assert max(step[2] for step in saved["consumed"]) <= 2


def test_limits_are_checked() -> None:
    """A deadline of nothing would lose every group."""
    with pytest.raises(ValueError, match="'call_s' must be > 0"):
        PoolLimits(call_s=0.0)
