"""A discrete-event simulation of an asynchronous run around the real `async_policy.Scheduler`.

Time, samplers and trainer are modelled; which group may start, which batch is next and when
something must be published is decided by the scheduler that real runs use.

A sampler replica of ``b`` running requests gives each of them one token every
``base_s + per_request_s * b`` seconds: the weights are read once a token, the caches once a
request. A group's samples run on one replica, which shares their prompt, and more groups than fit
wait in order. The trainer takes ``per_step_s + per_group_s * groups`` for a step. A publish takes
``publish_s``, in which no token is drawn; running requests then go on.
"""

import functools
import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import attrs

from async_policy import Scheduler, SchedulerConfig, Ticket
from rl_contracts import PolicyVersion


@attrs.frozen(kw_only=True)
class Samplers:
    """The replicas and how fast they are."""

    num_replicas: int = attrs.field(validator=attrs.validators.ge(1))
    """Engines, each of one or more devices."""

    max_requests: int = attrs.field(validator=attrs.validators.ge(1))
    """Requests that one replica runs at once."""

    base_s: float = attrs.field(validator=attrs.validators.gt(0.0))
    """Seconds per token of a replica that runs next to nothing."""

    per_request_s: float = attrs.field(validator=attrs.validators.ge(0.0))
    """Seconds by which each running request makes a token slower."""


@attrs.frozen(kw_only=True)
class Training:
    """How long the trainer works on a batch, and how often it publishes."""

    per_step_s: float = attrs.field(validator=attrs.validators.ge(0.0))
    """Seconds of a step, whatever is in it."""

    per_group_s: float = attrs.field(validator=attrs.validators.ge(0.0))
    """Seconds of a step for each group in it."""

    publish_every: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Steps between two publishes."""

    publish_s: float = attrs.field(default=0.0, validator=attrs.validators.ge(0.0))
    """Seconds of a publish, in which neither side works."""

    colocated: bool = False
    """Samplers and trainer take turns on the same devices: nothing overlaps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a simulated run was like."""

    step_ends_s: tuple[float, ...]
    """When each step was done, publish included."""

    trainer_idle: float
    """Share of the time in which the trainer neither trained nor published."""

    sampler_busy: float
    """Requests running on average, as a share of all places."""

    staleness: Mapping[int, int]
    """Groups by staleness at consumption, in scheduler steps."""

    max_waiting: int
    """Most groups that were sampled and not yet consumed."""

    tokens: int
    """Drawn in all."""

    def seconds_per_step(self, *, skip: int) -> float:
        """Mean seconds of a step after the first `skip` ones."""
        return (self.step_ends_s[-1] - self.step_ends_s[skip]) / (len(self.step_ends_s) - 1 - skip)


@dataclass(slots=True)
class _Replica:
    """Requests that share an engine; each gets as many tokens as `drawn` grows while it runs."""

    drawn: float = 0.0
    seen_at: float = 0.0
    """Time that `drawn` is of."""
    running: list[tuple[float, int, int]] = field(default_factory=list)
    """Heap of (value of `drawn` at its end, group, sample)."""
    alarm: int = 0
    """Number of the last event that was scheduled; earlier ones are void."""


class Simulation:
    """One run; `run` may be called once."""

    def __init__(
        self,
        schedule: SchedulerConfig,
        samplers: Samplers,
        training: Training,
        *,
        lengths: Callable[[int], list[int]],
    ) -> None:
        """Bind the parts.

        Args:
            schedule: what the scheduler is given.
            samplers: the replicas.
            training: the trainer.
            lengths: tokens of each sample of the group with this index.

        Raises:
            ValueError: if weights are published less often than the schedule allows.
        """
        if training.publish_every > schedule.max_publish_interval:
            message = (
                f"Simulation: publish_every = {training.publish_every} steps would lock up: the "
                f"schedule needs a publish every {schedule.max_publish_interval} steps"
            )
            raise ValueError(message)
        self._scheduler = Scheduler(schedule)
        self._samplers, self._training, self._lengths = samplers, training, lengths
        self._replicas = [_Replica() for _ in range(samplers.num_replicas)]
        self._now = self._busy = self._trained_s = self._running_s = 0.0
        self._events: list[tuple[float, int, str, int, int]] = []
        self._num_events = self._num_running = self._tokens = self._max_waiting = 0
        self._queue: deque[Ticket] = deque()
        self._tickets: dict[int, tuple[Ticket, PolicyVersion]] = {}
        self._left: dict[int, int] = {}
        self._paused = self._training_now = False
        self._ends: list[float] = []
        self._staleness: dict[int, int] = {}

    def run(self) -> Outcome:
        """Simulate to the last step."""
        self._admit()
        while not self._scheduler.finished or self._training_now or self._paused:
            if not self._events:
                message = f"the simulated run locked up: {self._scheduler.stall_reason}"
                raise RuntimeError(message)
            at, _, kind, what, number = heapq.heappop(self._events)
            if kind == "end" and number != self._replicas[what].alarm:
                continue
            self._advance(at)
            if kind == "end":
                if self._end_requests(what):
                    self._try_training()
                continue
            if kind == "trained":
                self._end_training()
            else:
                self._end_publish()
            self._try_training()
        places = self._samplers.num_replicas * self._samplers.max_requests
        return Outcome(
            step_ends_s=tuple(self._ends),
            trainer_idle=1.0 - self._trained_s / self._now,
            sampler_busy=self._running_s / (places * self._now),
            staleness=dict(sorted(self._staleness.items())),
            max_waiting=self._max_waiting,
            tokens=self._tokens,
        )

    def _schedule(self, after_s: float, kind: str, what: int = 0) -> int:
        self._num_events += 1
        heapq.heappush(
            self._events, (self._now + after_s, self._num_events, kind, what, self._num_events)
        )
        return self._num_events

    def _seconds_per_token(self, replica: _Replica) -> float:
        return self._samplers.base_s + self._samplers.per_request_s * len(replica.running)

    def _advance(self, at: float) -> None:
        """Let time pass."""
        self._running_s += (at - self._now) * self._num_running
        self._now = at

    def _draw(self, replica: _Replica) -> None:
        """Give the running requests their tokens up to now; before anything changes for them."""
        if replica.running and not self._paused:
            replica.drawn += (self._now - replica.seen_at) / self._seconds_per_token(replica)
        replica.seen_at = self._now

    def _set_alarm(self, index: int) -> None:
        """Schedule the next end of a request on a replica whose requests or pace changed."""
        replica = self._replicas[index]
        replica.alarm = 0
        if replica.running and not self._paused:
            left = max(0.0, replica.running[0][0] - replica.drawn)
            replica.alarm = self._schedule(left * self._seconds_per_token(replica), "end", index)

    def _admit(self) -> None:
        if not (self._training.colocated and (self._training_now or self._paused)):
            self._queue.extend(self._scheduler.admit())
        self._start()

    def _start(self) -> None:
        """Start waiting groups on the replica with the fewest requests, in order."""
        changed = set()
        while self._queue and not self._paused:
            index = min(
                range(len(self._replicas)), key=lambda i: (len(self._replicas[i].running), i)
            )
            replica = self._replicas[index]
            if len(replica.running) >= self._samplers.max_requests:
                break
            lengths = self._lengths(self._queue[0].index)
            if len(lengths) > self._samplers.max_requests:
                message = f"a group of {len(lengths)} samples fits on no replica"
                raise ValueError(message)
            if len(replica.running) + len(lengths) > self._samplers.max_requests:
                break
            self._draw(replica)
            ticket = self._queue.popleft()
            published = self._scheduler.published_version
            assert published is not None  # noqa: S101  # a run that was not restored
            self._tickets[ticket.index] = (ticket, published)
            self._left[ticket.index] = len(lengths)
            for sample, length in enumerate(lengths):
                heapq.heappush(replica.running, (replica.drawn + length, ticket.index, sample))
            self._tokens += sum(lengths)
            self._num_running += len(lengths)
            changed.add(index)
        for index in changed:
            self._set_alarm(index)

    def _end_requests(self, index: int) -> bool:
        """End what is due on a replica; whether a group became complete."""
        replica = self._replicas[index]
        before = self._scheduler.num_waiting
        self._draw(replica)
        # at least the one that the alarm was for, and those that end with it
        end = max(replica.drawn, replica.running[0][0]) + 1e-6
        while replica.running and replica.running[0][0] <= end:
            _, group, _ = heapq.heappop(replica.running)
            self._num_running -= 1
            self._left[group] -= 1
            if self._left[group] == 0:
                ticket, oldest = self._tickets.pop(group)
                del self._left[group]
                self._scheduler.complete(ticket, oldest)
        num_waiting = self._scheduler.num_waiting
        self._max_waiting = max(self._max_waiting, num_waiting)
        self._set_alarm(index)
        self._start()
        return num_waiting > before

    def _try_training(self) -> None:
        if self._training_now or self._paused or self._scheduler.finished:
            return
        batch = self._scheduler.take_batch()
        if batch is None:
            return
        for group in batch:
            self._staleness[group.staleness] = self._staleness.get(group.staleness, 0) + 1
        seconds = self._training.per_step_s + self._training.per_group_s * len(batch)
        self._trained_s += seconds
        self._training_now = True
        self._schedule(seconds, "trained")
        self._admit()

    def _end_training(self) -> None:
        self._training_now = False
        self._scheduler.trained(PolicyVersion(self._scheduler.trained_version + 1))
        if self._scheduler.trained_version % self._training.publish_every:
            self._ends.append(self._now)
            self._admit()
            return
        for replica in self._replicas:
            self._draw(replica)
        self._paused = True
        for index in range(len(self._replicas)):
            self._set_alarm(index)  # voids the alarms: nothing ends while nothing is drawn
        self._trained_s += self._training.publish_s
        self._schedule(self._training.publish_s, "published")

    def _end_publish(self) -> None:
        for replica in self._replicas:
            self._draw(replica)
        self._paused = False
        self._scheduler.published(self._scheduler.trained_version)
        self._ends.append(self._now)
        for index in range(len(self._replicas)):
            self._set_alarm(index)
        self._admit()


def lognormal_lengths(
    *, median: float, sigma: float, longest: int, group_size: int, spread: float, seed: int
) -> Callable[[int], list[int]]:
    """Lengths of a group's samples: a prompt's own difficulty, then chance; cut at `longest`.

    Args:
        median: of all lengths, in tokens, before the cut.
        sigma: standard deviation of the logarithm of all lengths.
        longest: where the sampler stops.
        group_size: samples of a group.
        spread: share of the variance that samples of one prompt have in common.
        seed: of the draws; the same index has the same lengths in every simulation.
    """

    @functools.lru_cache(maxsize=4096)
    def lengths(index: int) -> list[int]:
        draw = random.Random(f"{seed} {index}")  # noqa: S311  # a simulation
        common = draw.gauss(0.0, sigma * math.sqrt(spread))
        own = sigma * math.sqrt(1.0 - spread)
        return [
            max(1, min(longest, round(median * math.exp(common + draw.gauss(0.0, own)))))
            for _ in range(group_size)
        ]

    return lengths


def mean_length(lengths: Callable[[int], list[int]], *, num_groups: int = 2000) -> float:
    """Mean tokens of a sample."""
    return statistics.fmean(n for index in range(num_groups) for n in lengths(index))
