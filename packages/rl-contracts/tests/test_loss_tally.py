"""Sums of losses and metrics, and the losses that are refused."""

import pytest
import torch
from torch import Tensor

from rl_contracts.loss_tally import LossTally, TallyReport, total_of
from rl_contracts.rollout import PolicyVersion
from rl_contracts.train import LossOutput, PackedBatch

BATCH = PackedBatch(
    token_ids=torch.tensor([3, 4]),
    positions=torch.tensor([0, 1]),
    cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
    loss_mask=torch.tensor([False, True]),
    advantages=torch.zeros(1),
    rollout_logprobs=torch.zeros(2),
    trajectory_ids=("a",),
)
V3 = PolicyVersion(3)


def logprobs() -> Tensor:
    return torch.tensor([0.0, -2.0], requires_grad=True)


def report_of(*outputs: LossOutput) -> TallyReport:
    tally = LossTally()
    for output in outputs:
        tally.add(output, BATCH, logprobs()).backward()
    return tally.report()


def output(loss: Tensor, /, **metrics: Tensor) -> LossOutput:
    return LossOutput(loss=loss, metrics=metrics)


def test_losses_and_metrics_add_up() -> None:
    """Over two micro-batches and two ranks: 2 * (1 + 2) and 2 * (0.5 + 0.25)."""
    report = report_of(
        output(logprobs().sum() + 3.0, share=torch.tensor(0.5)),
        output(logprobs().sum() + 4.0, share=torch.tensor(0.25)),
    )
    assert total_of([report, report], policy_version=V3) == {"loss": 6.0, "share": 1.5}


def test_the_gradient_is_that_of_the_loss() -> None:
    """The tally hands the loss on as it is."""
    policy_logprobs = logprobs()
    loss = 3.0 * policy_logprobs.sum()
    assert LossTally().add(output(loss), BATCH, policy_logprobs) is loss


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (
            [output(torch.tensor(1.0))],
            r"the loss of micro-batch 0 \(trajectories a\) carries no gradient, although its",
        ),
        ([output(logprobs())], r"expected a scalar loss of micro-batch 0 .*, got shape \(2,\)"),
        (
            [output(logprobs().sum(), share=torch.ones(3))],
            r"expected a scalar share of micro-batch 0 .*, got shape \(3,\)",
        ),
        ([output(logprobs().sum(), loss=torch.ones(()))], r"'loss' is no name for a metric"),
        (
            [output(logprobs().sum(), one=torch.ones(())), output(logprobs().sum())],
            r"micro-batch 1 \(trajectories a\) has the metrics \['loss'\], those before it",
        ),
    ],
)
def test_what_is_wrong_is_said_after_the_backward_pass(
    outputs: list[LossOutput], text: str
) -> None:
    """Each micro-batch has its backward pass, so no rank waits; then all raise (A50's kind)."""
    good = report_of(output(logprobs().sum()))
    for reports, rank in (([report_of(*outputs), good], 0), ([good, report_of(*outputs)], 1)):
        with pytest.raises(ValueError, match=rf"on rank {rank}, {text}.*the gradient was dropped"):
            total_of(reports, policy_version=V3)


def test_without_tokens_in_the_mask_a_loss_needs_no_gradient() -> None:
    """There is nothing to learn, and the backward pass is that of zero."""
    policy_logprobs = logprobs()
    batch = PackedBatch(
        token_ids=BATCH.token_ids,
        positions=BATCH.positions,
        cu_seqlens=BATCH.cu_seqlens,
        loss_mask=torch.zeros(2, dtype=torch.bool),
        advantages=BATCH.advantages,
        rollout_logprobs=BATCH.rollout_logprobs,
        trajectory_ids=BATCH.trajectory_ids,
    )
    tally = LossTally()
    tally.add(output(torch.zeros(())), batch, policy_logprobs).backward()
    assert policy_logprobs.grad is not None
    assert policy_logprobs.grad.tolist() == [0.0, 0.0]
    assert total_of([tally.report()], policy_version=V3) == {"loss": 0.0}


def test_a_loss_that_is_not_finite_is_named_on_all_ranks() -> None:
    """Rank, micro-batch, trajectory and policy version are in the message."""
    good, bad = (report_of(output(logprobs().sum() * scale)) for scale in (1.0, float("inf")))
    with pytest.raises(
        FloatingPointError,
        match=r"at policy version 3 on rank 1, in micro-batch 0 \(trajectories a\): -inf; the grad",
    ):
        total_of([good, bad], policy_version=V3)


def test_other_metrics_on_another_rank_are_refused() -> None:
    """A sum over ranks needs the same names on each."""
    one, other = (
        report_of(output(logprobs().sum(), **{name: torch.ones(())})) for name in ("one", "other")
    )
    with pytest.raises(
        ValueError,
        match=r"on rank 1, expected the metrics of rank 0, \['loss', 'one'\], got \['loss'",
    ):
        total_of([one, other], policy_version=V3)
