"""The simulator of asynchronous runs: seconds worked out by hand, and the scheduler's bound."""

import sys
from pathlib import Path

import pytest

from async_policy import SchedulerConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from simulator import Outcome, Samplers, Simulation, Training, lognormal_lengths


def run(
    max_staleness: int, *, places: int = 1, publish_s: float = 0.0, per_request_s: float = 0.0
) -> Outcome:
    """10 tokens a group, one a second; 5 seconds of training for its one group."""
    return Simulation(
        SchedulerConfig(num_steps=6, groups_per_step=1, max_staleness=max_staleness),
        Samplers(
            num_replicas=1, max_requests=places, base_s=1.0 - per_request_s,
            per_request_s=per_request_s,
        ),
        Training(per_step_s=3.0, per_group_s=2.0, publish_s=publish_s),
        lengths=lambda _: [10],
    ).run()  # fmt: skip


def test_in_turn_takes_the_sum() -> None:
    """10 s of sampling, then 5 of training, then 1 of publishing."""
    outcome = run(0, publish_s=1.0)
    assert outcome.step_ends_s == pytest.approx([16 * step for step in range(1, 7)])
    assert outcome.trainer_idle == pytest.approx(10 / 16)
    assert outcome.sampler_busy == pytest.approx(10 / 16)
    assert outcome.staleness == {0: 6}


def test_one_step_off_takes_the_longer_of_the_two() -> None:
    """Sampling never stops: the first batch at 10 s, and one more every 10 s."""
    outcome = run(1)
    assert outcome.step_ends_s == pytest.approx([15, 25, 35, 45, 55, 65])
    assert outcome.staleness == {0: 1, 1: 5}
    assert outcome.tokens == 60


def test_a_publish_holds_the_running_requests() -> None:
    """Each batch takes 10 s of drawing and loses the 2 s of a publish in between."""
    outcome = run(1, publish_s=2.0)
    assert outcome.step_ends_s[:3] == pytest.approx([17, 29, 41])


def test_requests_that_share_a_replica_slow_each_other_down() -> None:
    """Two at once take 1.5 s a token: both done at 15 s, and with them the first two steps."""
    outcome = run(1, places=2, per_request_s=0.5)
    assert outcome.step_ends_s[:2] == pytest.approx([20, 25])


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_completion_order_is_faster_and_keeps_the_bound(max_staleness: int) -> None:
    """With lengths that differ a lot, waiting for the slow ones in turn costs time."""
    ends = {}
    for order in ("data", "completion"):
        outcome = Simulation(
            SchedulerConfig(
                num_steps=20, groups_per_step=4, max_staleness=max_staleness, order=order
            ),
            Samplers(num_replicas=4, max_requests=4, base_s=0.01, per_request_s=0.001),
            Training(per_step_s=1.0, per_group_s=0.5),
            lengths=lognormal_lengths(
                median=200, sigma=1.0, longest=4000, group_size=2, spread=0.5, seed=1
            ),
        ).run()
        assert max(outcome.staleness) <= max_staleness
        assert sum(outcome.staleness.values()) == 80
        ends[order] = outcome.step_ends_s[-1]
    assert ends["completion"] < ends["data"]


def test_publishing_too_rarely_is_refused_at_once() -> None:
    """It would lock up in the middle of the run."""
    with pytest.raises(
        ValueError, match=r"publish_every = 3 steps would lock up: .* every 2 steps"
    ):
        Simulation(
            SchedulerConfig(num_steps=6, groups_per_step=1, max_staleness=1),
            Samplers(num_replicas=1, max_requests=1, base_s=1.0, per_request_s=0.0),
            Training(per_step_s=1.0, per_group_s=0.0, publish_every=3),
            lengths=lambda _: [1],
        )
