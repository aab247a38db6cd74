"""Laws over random batches: layout and split change neither the loss nor its gradient."""

from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from algos_gspo_dapo_grpo import (
    BatchCounts,
    Bypass,
    CispoLoss,
    ClipCovLoss,
    DapoLoss,
    DecoupledPpoLoss,
    DppoKlLoss,
    DppoTvLoss,
    FixedNormaliser,
    GmpoLoss,
    GpgLoss,
    GrpoLoss,
    GspoLoss,
    GspoTokenLoss,
    KlCovLoss,
    KlPenalty,
    PolicyLoss,
    SapoLoss,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    Sequences,
    SequenceTruncation,
    TokenAdvantages,
    TokenMean,
    TokenTruncation,
    ToprLoss,
    WeightMasking,
    count_batch,
    policy_loss,
)

CONFIGS: dict[str, PolicyLoss] = {
    "grpo": GrpoLoss(),
    "grpo_all_terms": GrpoLoss(
        dual_clip=1.5,
        kl=KlPenalty(coefficient=0.3),
        rollout_correction=TokenTruncation(cap=1.2),
    ),
    "dr_grpo": GrpoLoss(aggregation=FixedNormaliser(normaliser=7.0)),
    "dapo": DapoLoss(rollout_correction=TokenTruncation(cap=1.2)),
    "gspo": GspoLoss(clip_low=0.1, clip_high=0.1),
    "gspo_token_mean": GspoLoss(clip_low=0.1, clip_high=0.1, aggregation=TokenMean()),
    "gspo_token_sum": GspoLoss(
        clip_low=0.1,
        clip_high=0.1,
        aggregation=SequenceMeanTokenSum(),
        kl=KlPenalty(coefficient=0.3, estimator="k2"),
        rollout_correction=TokenTruncation(cap=1.2),
    ),
    "gspo_token": GspoTokenLoss(clip_low=0.1, clip_high=0.1),
    "cispo": CispoLoss(clip_low=0.2, clip_high=0.2, kl=KlPenalty(coefficient=0.3)),
    "cispo_bypass": CispoLoss(rollout_correction=Bypass(), aggregation=SequenceMeanTokenSum()),
    "sapo": SapoLoss(rollout_correction=WeightMasking(low=0.8, high=1.3)),
    "sapo_token_mean": SapoLoss(aggregation=TokenMean()),
    "gmpo": GmpoLoss(clip_low=0.2, clip_high=0.2),
    "gmpo_token_sum": GmpoLoss(
        aggregation=SequenceMeanTokenSum(),
        rollout_correction=SequenceTruncation(level="geometric", cap=1.1),
    ),
    "dppo_tv": DppoTvLoss(threshold_low=0.1, threshold_high=0.1, rollout_correction=Bypass()),
    "dppo_kl": DppoKlLoss(kl=KlPenalty(coefficient=0.3, estimator="k3+")),
    "clip_cov": ClipCovLoss(aggregation=SequenceMeanTokenMean()),
    "kl_cov": KlCovLoss(kl=KlPenalty(coefficient=0.3, estimator="abs")),
    "gpg": GpgLoss(rollout_correction=SequenceTruncation(cap=1.2)),
    "decoupled_ppo": DecoupledPpoLoss(kl=KlPenalty(coefficient=0.1, estimator="k1+")),
    "topr": ToprLoss(),
    "topr_token_mean": ToprLoss(aggregation=TokenMean(), kl=KlPenalty(coefficient=0.2)),
    "grpo_sequence_masked": GrpoLoss(
        rollout_correction=WeightMasking(level="sequence", low=0.5, high=2.0)
    ),
}
# A stopped gradient is not the slope of the value, by intention.
SLOPES = {
    name: config
    for name, config in CONFIGS.items()
    if isinstance(
        config, GrpoLoss | DapoLoss | GspoLoss | SapoLoss | GmpoLoss | GpgLoss | ClipCovLoss
    )
}
# No deadline: the machine may be busy, and no law here is about time.
LAW = settings(deadline=None, max_examples=20, derandomize=True)
EVERY_LOSS = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence: four log-probabilities per token, its mask and its advantage."""

    logprobs: Tensor  # [4, time]: policy, proximal, rollout, ref
    mask: Tensor  # [time]
    selected: Tensor  # [time]: for the losses that treat some tokens apart
    advantage: float


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """Sequences of 0 to 6 tokens, some without a token in the mask, all in float64."""
    masks = draw(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    return [
        Row(
            logprobs=0.3 * torch.randn(4, len(mask), generator=generator, dtype=torch.float64),
            mask=torch.tensor(mask, dtype=torch.bool),
            selected=torch.rand(len(mask), generator=generator) < 0.3,
            advantage=torch.randn(1, generator=generator).item(),
        )
        for mask in masks
    ]


Result = tuple[Tensor, list[Tensor], dict[str, Tensor]]


def _loss(
    logprobs: Tensor,
    mask: Tensor,
    selected: Tensor,
    rows: list[Row],
    *,
    sequences: Sequences,
    config: PolicyLoss,
    counts: BatchCounts | None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    policy = logprobs[0].clone().requires_grad_()
    share = policy_loss(
        policy,
        proximal_logprobs=None if isinstance(config.rollout_correction, Bypass) else logprobs[1],
        advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float64),
        loss_mask=mask,
        sequences=sequences,
        config=config,
        counts=count_batch(mask, sequences) if counts is None else counts,
        rollout_logprobs=logprobs[2],
        ref_logprobs=None if isinstance(config, DapoLoss) or config.kl is None else logprobs[3],
        selected_tokens=selected if isinstance(config, ClipCovLoss | KlCovLoss) else None,
    )
    (gradient,) = torch.autograd.grad(share.loss, policy)
    return share.loss.detach(), gradient, share.metrics


def _packed(rows: list[Row], config: PolicyLoss, counts: BatchCounts | None = None) -> Result:
    lengths = torch.tensor([len(row.mask) for row in rows])
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    sequences = Sequences.packed(cu_seqlens, num_tokens=int(lengths.sum()))
    logprobs = torch.cat([row.logprobs for row in rows], dim=1)
    mask = torch.cat([row.mask for row in rows])
    selected = torch.cat([row.selected for row in rows])
    loss, gradient, metrics = _loss(
        logprobs, mask, selected, rows, sequences=sequences, config=config, counts=counts
    )
    return loss, list(gradient.split(lengths.tolist())), metrics


def _padded(rows: list[Row], config: PolicyLoss, counts: BatchCounts | None = None) -> Result:
    time = max(len(row.mask) for row in rows) + 2
    logprobs = torch.full((4, len(rows), time), torch.nan, dtype=torch.float64)
    mask = torch.zeros(len(rows), time, dtype=torch.bool)
    selected = torch.ones(len(rows), time, dtype=torch.bool)
    for index, row in enumerate(rows):
        logprobs[:, index, : len(row.mask)] = row.logprobs
        mask[index, : len(row.mask)] = row.mask
        selected[index, : len(row.mask)] = row.selected
    sequences = Sequences.padded(batch=len(rows), time=time)
    loss, gradient, metrics = _loss(
        logprobs, mask, selected, rows, sequences=sequences, config=config, counts=counts
    )
    assert (gradient[~mask] == 0.0).all()
    parts = [gradient[index, : len(row.mask)] for index, row in enumerate(rows)]
    return loss, parts, metrics


@EVERY_LOSS
@LAW
@given(rows=batches())
def test_packed_equals_padded(config: PolicyLoss, rows: list[Row]) -> None:
    """A16, A17: both layouts give the same loss, gradient and metrics; padding may be NaN."""
    torch.testing.assert_close(_packed(rows, config), _padded(rows, config))


@EVERY_LOSS
@LAW
@given(rows=batches(), cuts=st.sets(st.integers(1, 5)), layouts=st.lists(st.booleans()))
def test_any_split_adds_up_to_the_whole(
    config: PolicyLoss, rows: list[Row], cuts: set[int], layouts: list[bool]
) -> None:
    """A06, A07, A12, A13: shares of micro-batches or ranks, in any layout, are the whole."""
    loss, gradients, metrics = _packed(rows, config)
    counts = BatchCounts(
        num_tokens=sum(int(row.mask.sum()) for row in rows),
        num_sequences=sum(bool(row.mask.any()) for row in rows),
    )
    edges = [0, *sorted(cut for cut in cuts if cut < len(rows)), len(rows)]
    choices = [*layouts, *[True] * len(edges)]
    parts = [
        (_packed if packed else _padded)(rows[begin:end], config, counts)
        for begin, end, packed in zip(edges, edges[1:], choices, strict=False)
    ]
    torch.testing.assert_close(sum((part[0] for part in parts), torch.zeros(())).double(), loss)
    torch.testing.assert_close([row for part in parts for row in part[1]], gradients)
    totals = {
        name: torch.stack([part[2][name].double() for part in parts]).sum() for name in metrics
    }
    torch.testing.assert_close(totals, {name: value.double() for name, value in metrics.items()})


@EVERY_LOSS
@LAW
@given(rows=batches(), seed=st.integers(0, 1000))
def test_the_order_of_sequences_does_not_matter(
    config: PolicyLoss, rows: list[Row], seed: int
) -> None:
    """Permuting the sequences permutes the gradients and leaves the loss."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    loss, gradients, metrics = _packed(rows, config)
    permuted_loss, permuted_gradients, permuted_metrics = _packed(
        [rows[index] for index in order], config
    )
    torch.testing.assert_close(permuted_loss, loss)
    torch.testing.assert_close(permuted_gradients, [gradients[index] for index in order])
    torch.testing.assert_close(permuted_metrics, metrics)


@EVERY_LOSS
@LAW
@given(rows=batches(), scale=st.sampled_from([1.0, 1e2, 1e4]))
def test_everything_stays_finite(config: PolicyLoss, rows: list[Row], scale: float) -> None:
    """A14's kind: log-probabilities up to 1e4 nats apart give finite loss, gradient and metrics."""
    far = [replace(row, logprobs=(row.logprobs * scale).float()) for row in rows]
    loss, gradients, metrics = _packed(far, config)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert all(torch.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("config", SLOPES.values(), ids=SLOPES.keys())
@LAW
@given(rows=batches())
def test_the_gradient_is_that_of_the_value(config: PolicyLoss, rows: list[Row]) -> None:
    """Central differences along a random direction agree with the gradient, away from kinks."""
    loss_at: list[Tensor] = []
    generator = torch.Generator().manual_seed(7)
    directions = [
        torch.randn(len(row.mask), generator=generator, dtype=torch.float64) for row in rows
    ]
    step = 1e-6
    metrics_at = []
    for sign in (-1.0, 1.0):
        moved = []
        for row, direction in zip(rows, directions, strict=True):
            logprobs = row.logprobs.clone()
            logprobs[0] += sign * step * direction
            moved.append(replace(row, logprobs=logprobs))
        loss, _, metrics = _packed(moved, config)
        loss_at.append(loss)
        metrics_at.append(
            [value.item() for name, value in metrics.items() if name.endswith("clipped/fraction")]
        )
    if metrics_at[0] != metrics_at[1]:
        return  # a clip began or ended between the two points
    _, gradients, _ = _packed(rows, config)
    slope = sum(
        (gradient @ direction for gradient, direction in zip(gradients, directions, strict=True)),
        torch.zeros((), dtype=torch.float64),
    )
    torch.testing.assert_close((loss_at[1] - loss_at[0]) / (2 * step), slope, rtol=1e-4, atol=1e-6)


@EVERY_LOSS
@LAW
@given(rows=batches())
def test_equal_token_advantages_are_sequence_advantages(
    config: PolicyLoss, rows: list[Row]
) -> None:
    """Given per token or per sequence, the same advantages make the same loss, or are refused."""
    lengths = [len(row.mask) for row in rows]
    sequences = Sequences.packed(torch.tensor([0, *lengths]).cumsum(0), num_tokens=sum(lengths))
    logprobs = torch.cat([row.logprobs for row in rows], dim=1)
    mask = torch.cat([row.mask for row in rows])
    advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float64)

    def loss(given: Tensor | TokenAdvantages) -> Tensor:
        bypass = isinstance(config.rollout_correction, Bypass)
        with_kl = not isinstance(config, DapoLoss) and config.kl is not None
        selects = isinstance(config, ClipCovLoss | KlCovLoss)
        return policy_loss(
            logprobs[0],
            proximal_logprobs=None if bypass else logprobs[1],
            advantages=given,
            loss_mask=mask,
            sequences=sequences,
            config=config,
            counts=count_batch(mask, sequences),
            rollout_logprobs=logprobs[2],
            ref_logprobs=logprobs[3] if with_kl else None,
            selected_tokens=mask if selects else None,
        ).loss

    token_advantages = TokenAdvantages(values=sequences.spread(advantages))
    if isinstance(config, GspoLoss | GmpoLoss | ToprLoss):
        with pytest.raises(ValueError, match=r"one advantage per sequence, got TokenAdvantages"):
            loss(token_advantages)
    else:
        torch.testing.assert_close(loss(token_advantages), loss(advantages))


@EVERY_LOSS
def test_a_micro_batch_with_nothing_to_learn_gives_zero(config: PolicyLoss) -> None:
    """A11: loss and gradient 0 and the backward pass runs, though every input is NaN."""
    row = Row(
        logprobs=torch.full((4, 3), torch.nan),
        mask=torch.zeros(3, dtype=torch.bool),
        selected=torch.ones(3, dtype=torch.bool),
        advantage=float("nan"),
    )
    loss, gradients, metrics = _packed([row, row], config)
    assert loss.item() == 0.0
    assert [gradient.tolist() for gradient in gradients] == [[0.0] * 3] * 2
    assert all(value.item() == 0.0 for value in metrics.values())


def test_the_laws_hold_for_every_loss() -> None:
    """A new member of the union stands in these laws."""
    assert {type(config) for config in CONFIGS.values()} == set(get_args(PolicyLoss))
