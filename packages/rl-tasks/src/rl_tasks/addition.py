"""Single-digit addition: small enough to learn on a laptop, with problems held out.

"What is a + b?" for a and b from 0 to 9: one hundred problems, no system prompt. Reward 1 if the
last number of the completion is right, halved unless the model ended by itself.

``a + b`` and ``b + a`` are one fact: a model that was trained on ``3 + 9`` has nearly seen
``9 + 3``. So both are always on the same side of the split, and a held-out problem is one whose
mirror image was not trained on either. Of the held-out problems as large a share are doubles
(``4 + 4``) as of all hundred, up to rounding.
"""

from dataclasses import dataclass

import attrs

from rl_tasks.order import permutation
from rl_tasks.problem import ChatMessage, Problem
from rl_tasks.rewards import LastNumber, Reward, ScaledUnlessStopped

DATA_SOURCE = "addition"
"""The data source of the problems, under which a table of rewards holds `addition_reward`."""

_NUM_DIGITS = 10
_NUM_PROBLEMS = _NUM_DIGITS**2


@attrs.frozen(kw_only=True)
class AdditionConfig:
    """How the hundred problems are split."""

    num_heldout: int = attrs.field(
        default=20, validator=[attrs.validators.ge(1), attrs.validators.lt(_NUM_PROBLEMS)]
    )
    """Problems that are never trained on, of 100. Default: a fifth."""

    split_seed: int = 0
    """Chooses which ones; apart from the run's seed, so that runs with different seeds compare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdditionProblems:
    """The two sides of the split, each ordered by a, then b."""

    train: tuple[Problem, ...]
    heldout: tuple[Problem, ...]


def addition_problems(config: AdditionConfig) -> AdditionProblems:
    """All hundred problems, split; the same for the same config, everywhere."""
    heldout = _heldout_pairs(config)
    sides: dict[bool, list[Problem]] = {True: [], False: []}
    for a in range(_NUM_DIGITS):
        for b in range(_NUM_DIGITS):
            sides[(min(a, b), max(a, b)) in heldout].append(_problem(a, b))
    return AdditionProblems(train=tuple(sides[False]), heldout=tuple(sides[True]))


def addition_reward() -> Reward:
    """1 if the last number is right, halved unless the model ended by itself."""
    return ScaledUnlessStopped(inner=LastNumber(), factor=0.5)


def _heldout_pairs(config: AdditionConfig) -> set[tuple[int, int]]:
    """Unordered pairs to hold out: a double fills one place, any other pair two."""
    doubles = [(a, a) for a in range(_NUM_DIGITS)]
    others = [(a, b) for a in range(_NUM_DIGITS) for b in range(a + 1, _NUM_DIGITS)]
    # the number of doubles must leave an even number of places to the other pairs
    num_doubles = config.num_heldout // _NUM_DIGITS
    if (config.num_heldout - num_doubles) % 2:
        num_doubles += 1 if num_doubles < len(doubles) - 1 else -1
    num_others = (config.num_heldout - num_doubles) // 2
    chosen = permutation(len(doubles), key=f"addition/doubles/{config.split_seed}")[:num_doubles]
    pairs = {doubles[index] for index in chosen}
    chosen = permutation(len(others), key=f"addition/others/{config.split_seed}")[:num_others]
    return pairs | {others[index] for index in chosen}


def _problem(a: int, b: int) -> Problem:
    return Problem(
        problem_id=f"{DATA_SOURCE}/{a}+{b}",
        messages=(ChatMessage(role="user", content=f"What is {a} + {b}?"),),
        ground_truth=str(a + b),
        data_source=DATA_SOURCE,
        extra_info={"a": a, "b": b},
    )
