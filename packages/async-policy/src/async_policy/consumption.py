"""Which of the groups that are there the next step consumes, in either order.

Both orders are told of every group that starts, ends or is lost, and answer three questions: which
groups is the next step made of, which were set aside on the way, and how many groups can the steps
to come no longer have (`missing`).

Why groups may be set aside without breaking the bound
    `Scheduler` admits a group while ``t * B + o < p * B + L``, where ``o`` counts the groups ahead
    of it. With a refill, a step ends when it has ``B`` groups, or when it has looked at ``M``
    (`max_candidates`), and may then be short. Let ``missing`` be the number of groups that the
    steps ahead cannot have any more even if every open group is kept; then ``o + missing`` takes
    the place of ``o``. Setting a group aside lowers ``o`` by one, and raises ``missing`` by one at
    most: where it leaves less to look at than the step still needs. A short step counts as ``B``:
    its groups, and the missing ones. So ``t * B + o + missing`` never rises while a group waits,
    and the step that consumes it is never later than at its admission.

    In data order ``missing`` comes from walking over the steps ahead as if every open group were
    kept: then each step ends the earliest, and the number of steps before a group is the most that
    it can be. In completion order a group is looked at when it is completed, so ``M`` is about the
    number of groups set aside since the step before, of any place.

Why it still cannot lock up
    If nothing is in flight and the step has neither ``B`` groups nor looked at ``M``, it misses
    fewer groups than it lacks, so ``o + missing < B`` and the next prompt is admitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

from async_policy.schedule import Ticket


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What one step consumes."""

    chosen: tuple[int, ...]
    """Indices to train on, rising."""

    set_aside: tuple[int, ...]
    """Indices looked at for this step and not kept, rising."""


class Consumption(Protocol):
    """An order in which groups are consumed."""

    def started(self, ticket: Ticket) -> None:
        """A group is in flight."""

    def lost(self, ticket: Ticket) -> None:
        """A group that was in flight is to be redone."""

    def completed(self, ticket: Ticket, *, keep: bool) -> None:
        """A group that was in flight is there, to be trained on or set aside."""

    def missing(self, next_index: int) -> int:
        """Groups that the steps ahead of a new group at `next_index` can no longer have."""

    def ready(self, step: int) -> Selection | None:
        """What the next step, which leads from version `step`, is made of, or None as yet.

        With fewer groups than a step has, it has looked at as many as it may.
        """

    def rest(self) -> Selection:
        """What is there for the next step, when nothing more will come."""

    def taken(self, selection: Selection) -> None:
        """What `ready` or `rest` returned is consumed."""

    @property
    def num_set_aside(self) -> int:
        """Groups set aside and not yet part of a selection that was taken."""


@final
class InDataOrder:
    """A step takes the first groups of the data order that are kept, and waits for each.

    It looks at a window of the data order, from the place where the step before ended.
    """

    def __init__(self, *, size: int, limit: int | None, first: int) -> None:
        """Begin at index `first`, with `size` groups a step and at most `limit` looked at."""
        self._size = size
        self._limit = limit
        self._first = first  # where the next step's window begins
        self._end = first  # every index in between is there
        self._chosen: list[int] = []  # those among them that are kept
        self._kept: dict[int, bool] = {}  # groups that are there, from the window's begin
        self._num_aside = 0
        self._walked: tuple[int, int, int, int] | None = None

    def started(self, ticket: Ticket) -> None:
        """Nothing: the indices say it."""

    def lost(self, ticket: Ticket) -> None:
        """Nothing: it keeps its place."""

    def completed(self, ticket: Ticket, *, keep: bool) -> None:
        """See `Consumption`."""
        self._kept[ticket.index] = keep
        if not keep:
            self._num_aside += 1
            self._walked = None
        self._advance()

    def missing(self, next_index: int) -> int:
        """See `Consumption`. Walks only if a step can be short: where enough was set aside."""
        if self._limit is None or self._num_aside <= self._limit - self._size:
            return 0
        index, steps, kept, seen = self._walked or (self._first, 0, 0, 0)
        while index < next_index:
            kept += self._kept.get(index, True)
            seen += 1
            index += 1
            if kept == self._size or seen == self._limit:
                steps, kept, seen = steps + 1, 0, 0
        self._walked = (index, steps, kept, seen)
        short = max(0, (self._size - kept) - (self._limit - seen))
        num_open_or_kept = next_index - self._first - self._num_aside
        return steps * self._size + kept + short - num_open_or_kept

    def ready(self, step: int) -> Selection | None:  # noqa: ARG002 -- the order needs no version
        """See `Consumption`."""
        return self.rest() if self._ended() else None

    def rest(self) -> Selection:
        """See `Consumption`."""
        window = range(self._first, self._end)
        return Selection(
            chosen=tuple(self._chosen),
            set_aside=tuple(index for index in window if not self._kept[index])
            if self._num_aside
            else (),
        )

    def taken(self, selection: Selection) -> None:
        """See `Consumption`."""
        for index in (*selection.chosen, *selection.set_aside):
            del self._kept[index]
        self._num_aside -= len(selection.set_aside)
        self._first = self._end
        self._chosen = []
        self._walked = None
        self._advance()

    @property
    def num_set_aside(self) -> int:
        """See `Consumption`."""
        return self._num_aside

    def _ended(self) -> bool:
        return len(self._chosen) == self._size or self._end - self._first == self._limit

    def _advance(self) -> None:
        while not self._ended() and self._end in self._kept:
            if self._kept[self._end]:
                self._chosen.append(self._end)
            self._end += 1


@final
class InCompletionOrder:
    """A step takes completed groups with the earliest deadlines, as far as the others can wait.

    A group's deadline is its ticket's step, the last version that may consume it.
    """

    def __init__(self, *, size: int, limit: int | None) -> None:
        """Begin with `size` groups a step and at most `limit` looked at."""
        self._size = size
        self._limit = limit
        self._done: dict[int, list[int]] = {}  # by deadline, as they were completed
        self._num_open: dict[int, int] = {}  # in flight or done, by deadline
        self._deadlines: dict[int, int] = {}  # of the groups that are done
        self._aside: list[int] = []

    def started(self, ticket: Ticket) -> None:
        """See `Consumption`."""
        self._num_open[ticket.step] = self._num_open.get(ticket.step, 0) + 1

    def lost(self, ticket: Ticket) -> None:
        """See `Consumption`."""
        self._forget(ticket.step)

    def completed(self, ticket: Ticket, *, keep: bool) -> None:
        """See `Consumption`."""
        if keep:
            self._done.setdefault(ticket.step, []).append(ticket.index)
            self._deadlines[ticket.index] = ticket.step
        else:
            self._forget(ticket.step)
            self._aside.append(ticket.index)

    def missing(self, next_index: int) -> int:  # noqa: ARG002 -- places do not matter here
        """See `Consumption`."""
        if self._limit is None:
            return 0
        return max(0, len(self._aside) + self._size - self._limit)

    def ready(self, step: int) -> Selection | None:
        """See `Consumption`."""
        num_done = len(self._deadlines)
        if num_done < self._size and not self._looked_at_enough(num_done):
            return None
        chosen: list[int] = []
        num_left = 0
        for deadline in sorted(self._num_open):
            done = self._done.get(deadline, [])[: self._size - len(chosen)]
            chosen += done
            num_left += self._num_open[deadline] - len(done)
            if num_left > (deadline - step) * self._size:
                return None
        return Selection(chosen=tuple(sorted(chosen)), set_aside=tuple(sorted(self._aside)))

    def rest(self) -> Selection:
        """See `Consumption`."""
        return Selection(
            chosen=tuple(sorted(self._deadlines)), set_aside=tuple(sorted(self._aside))
        )

    def taken(self, selection: Selection) -> None:
        """See `Consumption`."""
        self._remove(selection.chosen)
        self._aside = []

    @property
    def num_set_aside(self) -> int:
        """See `Consumption`."""
        return len(self._aside)

    def _looked_at_enough(self, num_done: int) -> bool:
        return self._limit is not None and len(self._aside) + num_done >= self._limit

    def _remove(self, indices: Sequence[int]) -> None:
        for index in indices:
            deadline = self._deadlines.pop(index)
            done = self._done[deadline]
            done.remove(index)
            if not done:
                del self._done[deadline]
            self._forget(deadline)

    def _forget(self, deadline: int) -> None:
        """One group less in flight or done among those of this deadline."""
        self._num_open[deadline] -= 1
        if not self._num_open[deadline]:
            del self._num_open[deadline]
