"""The order of the prompts: exact, resumable, and the same for every number of shards.

Epoch ``e`` is the list of problem indexes sorted by ``blake2b(f"{seed}/{e}/{index}")``. A hash
that is written down, and not a library's shuffle, keeps the order across processes, machines,
Python's string hashing and releases of numpy.

All epochs end to end form one endless sequence of draws. Shard ``k`` of ``n`` gets the positions
``k, k + n, k + 2n, ...`` of it, so the shards together draw every problem of an epoch exactly
once, whatever their number.

::

    position   0  1  2 | 3  4  5 | 6 ...      3 problems, 2 shards
    epoch      0  0  0 | 1  1  1 | 2
    shard      0  1  0   1  0  1   0
"""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple, TypedDict, final


class Draw(NamedTuple):
    """One prompt that is due."""

    position: int
    """Number of the draw in the whole run, over all shards; unique, and good as a group's id."""

    epoch: int
    """How often the data set has been gone through before."""

    problem: int
    """Index of the problem in the data set."""


class OrderState(TypedDict):
    """Where an order stands; can be written as JSON."""

    epoch: int
    index: int
    """Draws of `epoch` that are done, over all shards."""

    num_problems: int
    seed: int


@final
class PromptOrder:
    """An endless, seeded sequence of draws.

    The state is the same on all shards that have taken equally many draws, and does not name the
    shards: a run may resume with another number of them.
    """

    def __init__(
        self, *, num_problems: int, seed: int, shard: int = 0, num_shards: int = 1
    ) -> None:
        """Begin at the first draw.

        Args:
            num_problems: size of the data set, at least 1.
            seed: chooses the permutations.
            shard: which part of the sequence this is, from 0.
            num_shards: number of parts.

        Raises:
            ValueError: for an empty data set or a shard that does not exist.
        """
        if num_problems < 1:
            message = f"PromptOrder: expected at least 1 problem, got {num_problems}"
            raise ValueError(message)
        if not 0 <= shard < num_shards:
            message = (
                "PromptOrder: expected 0 <= shard < num_shards, "
                f"got shard {shard} and num_shards {num_shards}"
            )
            raise ValueError(message)
        self._num_problems = num_problems
        self._seed = seed
        self._shard = shard
        self._num_shards = num_shards
        self._round_start = 0
        self._cached_epoch = -1
        self._cached_permutation: list[int] = []

    def take(self, count: int) -> list[Draw]:
        """The next `count` draws of this shard, over the ends of epochs where needed.

        Raises:
            ValueError: for a negative count.
        """
        if count < 0:
            message = f"PromptOrder.take: expected a count of at least 0, got {count}"
            raise ValueError(message)
        draws = []
        for _ in range(count):
            position = self._round_start + self._shard
            epoch, index = divmod(position, self._num_problems)
            draws.append(Draw(position, epoch, self._permutation(epoch)[index]))
            self._round_start += self._num_shards
        return draws

    def state(self) -> OrderState:
        """Where the order stands."""
        epoch, index = divmod(self._round_start, self._num_problems)
        return {
            "epoch": epoch,
            "index": index,
            "num_problems": self._num_problems,
            "seed": self._seed,
        }

    def load_state(self, state: Mapping[str, object]) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: if the state is of another order, or not a state.
        """
        expected = set(OrderState.__annotations__)
        if set(state) != expected:
            message = (
                f"PromptOrder.load_state: expected the keys {sorted(expected)}, got {sorted(state)}"
            )
            raise ValueError(message)
        for name, own in (("num_problems", self._num_problems), ("seed", self._seed)):
            if state[name] != own:
                message = (
                    f"PromptOrder.load_state: the state was taken with {name} {state[name]!r}, "
                    f"this order has {name} {own!r}; resume with the data and the seed of the "
                    "interrupted run"
                )
                raise ValueError(message)
        epoch, index = state["epoch"], state["index"]
        if (
            type(epoch) is not int
            or type(index) is not int
            or epoch < 0
            or not 0 <= index < self._num_problems
        ):
            message = (
                "PromptOrder.load_state: expected epoch >= 0 and "
                f"0 <= index < {self._num_problems}, got epoch {epoch!r} and index {index!r}"
            )
            raise ValueError(message)
        self._round_start = epoch * self._num_problems + index

    def _permutation(self, epoch: int) -> list[int]:
        if epoch != self._cached_epoch:
            self._cached_permutation = permutation(self._num_problems, key=f"{self._seed}/{epoch}")
            self._cached_epoch = epoch
        return self._cached_permutation


def permutation(count: int, *, key: str) -> list[int]:
    """The numbers below `count` in an order that `key` fixes for good."""
    digests = [
        hashlib.blake2b(f"{key}/{index}".encode(), digest_size=16).digest()
        for index in range(count)
    ]
    return sorted(range(count), key=digests.__getitem__)
