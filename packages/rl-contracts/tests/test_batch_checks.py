"""What is refused of micro-batches, and what all ranks say of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_contracts.batch_checks import BatchReport, inspect_batches, name_of, refuse_malformed
from rl_contracts.train import PackedBatch

GOOD = PackedBatch(
    token_ids=torch.tensor([3, 4, 5, 6, 0]),
    positions=torch.tensor([0, 1, 2, 0, 1]),
    cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
    loss_mask=torch.tensor([False, False, True, False, True]),
    advantages=torch.zeros(2),
    rollout_logprobs=torch.zeros(5),
    trajectory_ids=("a", "b"),
)


def test_a_good_batch_passes() -> None:
    """Also one whose last token id is the last of the vocabulary."""
    report = inspect_batches([GOOD, GOOD], vocab_size=7)
    assert report == BatchReport(num_batches=2, problem="")
    refuse_malformed("logprobs", [report, report])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"loss_mask": torch.tensor([False, False, True, True, True])},
            "loss_mask is True on the first token of a sequence, whose log-probability has no pre",
        ),
        (
            {"positions": torch.zeros(5, dtype=torch.int64)},
            "expected positions that count from 0 in each sequence",
        ),
        ({"token_ids": torch.tensor([3, 4, -1, 6, 0])}, "token ids from 0 to 6, got -1 to 6"),
        ({"token_ids": torch.tensor([3, 4, 7, 6, 0])}, "token ids from 0 to 6, got 0 to 7"),
        ({"cu_seqlens": torch.tensor([0, 3, 4])}, "rise from 0 to its 5 tokens, got [0, 3, 4]"),
        ({"cu_seqlens": torch.tensor([1, 3, 5])}, "rise from 0 to its 5 tokens, got [1, 3, 5]"),
        ({"cu_seqlens": torch.tensor([0, 6, 5])}, "rise from 0 to its 5 tokens, got [0, 6, 5]"),
        ({"cu_seqlens": torch.tensor([0, 5, 5])}, "rise from 0 to its 5 tokens, got [0, 5, 5]"),
        (
            {"cu_seqlens": torch.tensor([5]), "advantages": torch.zeros(0), "trajectory_ids": ()},
            "rise from 0 to its 5 tokens, got [5]",
        ),
        ({"cu_seqlens": torch.tensor([0.0, 3.0, 5.0])}, "cu_seqlens of type torch.int32, got"),
        ({"token_ids": torch.tensor([3.0, 4, 5, 6, 0])}, "token_ids of type torch.int64, got"),
        ({"positions": torch.tensor([0.0, 1, 2, 0, 1])}, "positions of type torch.int64, got"),
        ({"loss_mask": torch.tensor([0, 0, 1, 0, 1])}, "loss_mask of type torch.bool, got torch"),
    ],
)
def test_a_malformed_batch_is_named(changes: dict[str, Tensor], text: str) -> None:
    """The micro-batch, its trajectories, and what was expected (A50's kind)."""
    bad = changed(**changes)
    report = inspect_batches([GOOD, bad], vocab_size=7)
    assert report.num_batches == 2
    assert report.problem.startswith(f"{name_of(1, bad)}: ")
    assert text in report.problem


def changed(**changes: Any) -> PackedBatch:  # noqa: ANN401
    return replace(GOOD, **changes)


def test_no_tokens_at_all_are_malformed() -> None:
    """Looking at an empty batch is no error of its own, which one rank alone would have."""
    nothing = torch.zeros(0, dtype=torch.int64)
    empty = changed(
        token_ids=nothing,
        positions=nothing,
        loss_mask=nothing.bool(),
        rollout_logprobs=nothing.float(),
        cu_seqlens=torch.tensor([0]),
        advantages=torch.zeros(0),
        trajectory_ids=(),
    )
    assert inspect_batches([empty], vocab_size=7).problem == (
        "micro-batch 0 (without trajectory ids): expected token_ids of shape (0,), not empty, got "
        "(0,)"
    )


def test_all_ranks_say_the_same() -> None:
    """What is wrong on rank 1 is refused with its rank, on whichever rank the reports are read."""
    good, bad = (
        inspect_batches([batch], vocab_size=7)
        for batch in (GOOD, changed(positions=GOOD.positions + 1))
    )
    with pytest.raises(
        ValueError, match=r"^logprobs: on rank 1, micro-batch 0 \(trajectories a, b\): expected pos"
    ):
        refuse_malformed("logprobs", [good, bad])


@pytest.mark.parametrize(("counts", "shown"), [((2, 1), "2, 1"), ((0, 0), "0, 0")])
def test_counts_are_compared(counts: tuple[int, ...], shown: str) -> None:
    """Other numbers of micro-batches would leave a rank waiting; none has no loss (A50)."""
    reports = [BatchReport(num_batches=count, problem="") for count in counts]
    with pytest.raises(
        ValueError, match=rf"on every rank, at least one, got {shown}; rl_contracts"
    ):
        refuse_malformed("logprobs", reports)
