"""Dynamic sampling: fill a batch with groups that carry a signal, within an explicit bound.

A group whose samples all have the same score has advantages of 0 and teaches nothing. DAPO goes
on sampling until the batch is full of others (Yu et al. 2025, arXiv:2503.14476, section 3.2,
eq. 11). Plain Python: knows nothing of tensors, and not where groups come from.

    offer(group, scores) ──▶ uniform?  ── yes ─▶ counted ──┐
                               │ no                        ├─▶ candidates left?  no ─▶ error
                               ▼                           │
                             kept ──▶ batch full? ─ no ────┘
                                          │ yes
                                          ▼
                                   InformativeBatch, counters start again
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, final

import attrs

GroupT = TypeVar("GroupT")


class DynamicSamplingError(RuntimeError):
    """A batch could not be filled; the message holds the counts and the way out."""


@final
@attrs.frozen(kw_only=True)
class DynamicSampling:
    """When to give up, and what to do with a batch that the source's end left short."""

    max_rounds: int | None = attrs.field(
        validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Candidates looked at for one batch, in multiples of the batch's size, before giving up.

    None: no limit of our own, so only the end of the source ends the search.
    """

    incomplete: Literal["yield", "raise"] = attrs.field(
        validator=attrs.validators.in_(("yield", "raise"))
    )
    """When the source ends within a batch: hand out the short batch, or raise."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class InformativeBatch(Generic[GroupT]):
    """Groups with a signal, and what it took to find them."""

    groups: tuple[GroupT, ...]
    """In the order in which they were offered."""

    num_candidates: int
    """Groups looked at for this batch, the kept ones included."""

    @property
    def num_uniform(self) -> int:
        """Groups left out because all their scores were equal."""
        return self.num_candidates - len(self.groups)


def is_informative(scores: Sequence[float]) -> bool:
    """Whether a group's scores differ, so that its advantages are not all 0.

    Scores that are not finite (None of the sample could be scored) do not count; with fewer than
    two that do, there is nothing to compare.
    """
    finite = [score for score in scores if math.isfinite(score)]
    return len(finite) > 1 and min(finite) < max(finite)


@final
class InformativeBatchBuilder(Generic[GroupT]):
    """Collects groups as they finish; for loops that await them. See `informative_batches`."""

    def __init__(self, *, num_groups: int, config: DynamicSampling) -> None:
        if num_groups < 1:
            raise ValueError(f"InformativeBatchBuilder: expected num_groups >= 1, got {num_groups}")
        self._num_groups = num_groups
        self._config = config
        self._kept: list[GroupT] = []
        self._num_candidates = 0

    def offer(self, group: GroupT, scores: Sequence[float]) -> InformativeBatch[GroupT] | None:
        """Look at one group; returns the batch if this group filled it.

        Args:
            group: anything; it is handed back as it is.
            scores: what the samples are compared by. The paper compares accuracy, before any
                length punishment.

        Raises:
            DynamicSamplingError: if `max_rounds` are used up and the batch is not full.
        """
        self._num_candidates += 1
        if is_informative(scores):
            self._kept.append(group)
        if len(self._kept) == self._num_groups:
            return self._take()
        max_rounds = self._config.max_rounds
        if max_rounds is not None and self._num_candidates >= max_rounds * self._num_groups:
            raise DynamicSamplingError(
                f"dynamic sampling: {max_rounds} rounds of {self._num_groups} groups gave "
                f"{self._found()}; use prompts of a difficulty that the policy sometimes solves, "
                "a larger group, or a larger max_rounds"
            )
        return None

    def finish(self) -> InformativeBatch[GroupT] | None:
        """Say that no more groups will come; returns the short batch, if there is any.

        Candidates that were all uniform give a batch without groups, so that they are counted.

        Raises:
            DynamicSamplingError: if a batch was begun and `incomplete` is ``"raise"``.
        """
        if self._num_candidates == 0:
            return None
        if self._config.incomplete == "raise":
            raise DynamicSamplingError(
                f"dynamic sampling: the source ended with {self._found()}; add prompts, or set "
                "incomplete to 'yield' to train on the short batch"
            )
        return self._take()

    def _found(self) -> str:
        num_uniform = self._num_candidates - len(self._kept)
        return (
            f"{len(self._kept)} of the {self._num_groups} groups needed: {num_uniform} of "
            f"{self._num_candidates} candidates ({num_uniform / self._num_candidates:.0%}) had "
            "equal scores"
        )

    def _take(self) -> InformativeBatch[GroupT]:
        batch = InformativeBatch(groups=tuple(self._kept), num_candidates=self._num_candidates)
        self._kept, self._num_candidates = [], 0
        return batch


def informative_batches(
    groups: Iterable[GroupT],
    *,
    scores_of: Callable[[GroupT], Sequence[float]],
    num_groups: int,
    config: DynamicSampling,
) -> Iterator[InformativeBatch[GroupT]]:
    """Yield batches of groups with a signal until the source ends (DAPO, section 3.2).

    Draws from `groups` one at a time and never more than the batch in hand needs, so a source
    that samples lazily samples nothing in vain.

    Args:
        groups: candidates, in order; its end is the end of this iterator.
        scores_of: what the samples of a group are compared by.
        num_groups: groups in a batch.
        config: bound, and what to do with a short last batch.

    Raises:
        DynamicSamplingError: if the bound is reached, or the source ends within a batch and
            `config.incomplete` is ``"raise"``.
    """
    builder: InformativeBatchBuilder[GroupT] = InformativeBatchBuilder(
        num_groups=num_groups, config=config
    )
    for group in groups:
        batch = builder.offer(group, scores_of(group))
        if batch is not None:
            yield batch
    last = builder.finish()
    if last is not None:
        yield last
