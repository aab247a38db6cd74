"""The one call for loops: hand numbers, equivalences, and what it refuses."""

import inspect
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from algos_gspo_dapo_grpo import (
    BatchCounts,
    DapoLoss,
    FixedNormaliser,
    GrpoLoss,
    GspoLoss,
    KlPenalty,
    LossShare,
    PolicyLoss,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    Sequences,
    TokenMean,
    TokenTruncation,
    count_batch,
    policy_loss,
)

# Two sequences: prompt token and two sampled ones, prompt token and one sampled one.
SEQUENCES = Sequences.packed(torch.tensor([0, 3, 5], dtype=torch.int32), num_tokens=5)
MASK = torch.tensor([False, True, True, False, True])
COUNTS = BatchCounts(num_tokens=3, num_sequences=2)
ADVANTAGES = torch.tensor([1.0, -2.0])
RATIOS = (1.0, 1.1, 1.5, 1.0, 0.9)


def _policy() -> Tensor:
    return torch.log(torch.tensor(RATIOS)).requires_grad_()


def _run(
    config: PolicyLoss,
    policy: Tensor | None = None,
    *,
    rollout_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
) -> LossShare:
    return policy_loss(
        _policy() if policy is None else policy,
        proximal_logprobs=torch.zeros(5),
        advantages=ADVANTAGES,
        loss_mask=MASK,
        sequences=SEQUENCES,
        config=config,
        counts=COUNTS,
        rollout_logprobs=rollout_logprobs,
        ref_logprobs=ref_logprobs,
    )


def _gradient(loss: Tensor, policy: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, policy)
    return gradient


def test_grpo_by_hand() -> None:
    """Token losses -1.1, -1.2 (clipped) and +1.8: mean over sequences of token means."""
    policy = _policy()
    share = _run(GrpoLoss(), policy)
    assert share.loss.item() == pytest.approx(((-1.1 - 1.2) / 2 + 1.8) / 2)
    expected = [0.0, -1.1 / 4, 0.0, 0.0, 1.8 / 2]
    assert _gradient(share.loss, policy).tolist() == pytest.approx(expected)
    assert share.metrics["ratio/importance/mean"].item() == pytest.approx((1.1 + 1.5 + 0.9) / 3)
    assert share.metrics["ratio/clipped/fraction"].item() == pytest.approx(1 / 3)
    assert share.metrics["loss/policy/mean"].item() == share.loss.item()


def test_dapo_by_hand() -> None:
    """Token losses -1.1, -1.28 (clipped higher) and +1.8: mean over tokens."""
    assert _run(DapoLoss()).loss.item() == pytest.approx((-1.1 - 1.28 + 1.8) / 3)


def test_gspo_by_hand() -> None:
    """Sequence ratios sqrt(1.65), clipped to 1.2, and 0.9: mean over sequences."""
    policy = _policy()
    share = _run(GspoLoss(clip_low=0.2, clip_high=0.2), policy)
    assert share.loss.item() == pytest.approx((-1.2 + 1.8) / 2)
    expected = [0.0, 0.0, 0.0, 0.0, 1.8 / 2]
    assert _gradient(share.loss, policy).tolist() == pytest.approx(expected)
    mean_ratio = (math.sqrt(1.65) + 0.9) / 2
    assert share.metrics["ratio/importance/mean"].item() == pytest.approx(mean_ratio)
    assert share.metrics["ratio/clipped/fraction"].item() == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (SequenceMeanTokenMean(), (-1.2 + 1.8) / 2),
        (TokenMean(), (2 * -1.2 + 1.8) / 3),
        (SequenceMeanTokenSum(), (2 * -1.2 + 1.8) / 2),
        (FixedNormaliser(normaliser=4.0), (2 * -1.2 + 1.8) / 8),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_gspo_honours_every_aggregation(
    aggregation: SequenceMeanTokenMean | TokenMean | SequenceMeanTokenSum | FixedNormaliser,
    expected: float,
) -> None:
    """Sequence losses -1.2 (two tokens) and 1.8 (one token), weighted as the kind says."""
    config = GspoLoss(clip_low=0.2, clip_high=0.2, aggregation=aggregation)
    assert _run(config).loss.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    "config", [GrpoLoss(), DapoLoss(), GspoLoss()], ids=["grpo", "dapo", "gspo"]
)
def test_without_proximal_logprobs_the_ratio_is_one(config: PolicyLoss) -> None:
    """None means on policy: the loss is the mean of -A, its gradient REINFORCE's."""
    policy = torch.randn(5, requires_grad=True)
    share = policy_loss(
        policy,
        proximal_logprobs=None,
        advantages=ADVANTAGES,
        loss_mask=MASK,
        sequences=SEQUENCES,
        config=config,
        counts=COUNTS,
    )
    token_mean = isinstance(config, DapoLoss)
    weights = [0, 1 / 3, 1 / 3, 0, 1 / 3] if token_mean else [0, 1 / 4, 1 / 4, 0, 1 / 2]
    per_token = torch.tensor(weights) * torch.tensor([0.0, -1.0, -1.0, 0.0, 2.0])
    torch.testing.assert_close(_gradient(share.loss, policy), per_token)
    assert share.loss.item() == pytest.approx(per_token.sum().item())
    assert share.metrics["ratio/importance/mean"].item() == pytest.approx(1.0)
    assert share.metrics["ratio/clipped/fraction"].item() == 0.0


def test_dapo_with_equal_clips_is_token_mean_grpo() -> None:
    """DAPO's loss differs from GRPO's in the clip range and the mean only."""
    dapo_policy, grpo_policy = _policy(), _policy()
    dapo = _run(DapoLoss(clip_high=0.2), dapo_policy)
    grpo = _run(GrpoLoss(aggregation=TokenMean()), grpo_policy)
    assert dapo.loss.item() == grpo.loss.item()
    assert _gradient(dapo.loss, dapo_policy).equal(_gradient(grpo.loss, grpo_policy))
    assert dapo.metrics == grpo.metrics


def test_gspo_on_sequences_of_one_token_is_grpo() -> None:
    """With one token the sequence ratio is the token ratio, whatever the mean."""
    sequences = Sequences.padded(batch=6, time=2)
    mask = torch.tensor([[False, True]]).expand(6, 2)
    results = []
    for config in (GspoLoss(clip_low=0.2, clip_high=0.2), GrpoLoss()):
        torch.manual_seed(1)
        policy = (0.3 * torch.randn(6, 2)).requires_grad_()
        share = policy_loss(
            policy,
            proximal_logprobs=torch.zeros(6, 2),
            advantages=torch.randn(6),
            loss_mask=mask,
            sequences=sequences,
            config=config,
            counts=count_batch(mask, sequences),
        )
        results.append((share.loss.detach(), _gradient(share.loss, policy), share.metrics))
    torch.testing.assert_close(results[0], results[1])


def test_dr_grpo_is_a_fixed_normaliser() -> None:
    """Token sums divided by 10 and averaged over two sequences."""
    loss = _run(GrpoLoss(aggregation=FixedNormaliser(normaliser=10.0))).loss
    assert loss.item() == pytest.approx((-1.1 - 1.2 + 1.8) / 20)


def test_dual_clip_acts_and_is_reported() -> None:
    """Ratio 9 with A = -2 costs 18 without the dual clip of 3, and 6 with it."""
    policy = torch.tensor([0.0, 0.0, 0.0, 0.0, math.log(9.0)])
    plain = _run(GrpoLoss(), policy)
    dual = _run(GrpoLoss(dual_clip=3.0), policy)
    assert plain.loss.item() == pytest.approx((-1 + 18) / 2)
    assert dual.loss.item() == pytest.approx((-1 + 6) / 2)
    assert "ratio/dual_clipped/fraction" not in plain.metrics
    assert dual.metrics["ratio/dual_clipped/fraction"].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("config", [GrpoLoss, GspoLoss], ids=["grpo", "gspo"])
def test_the_kl_term_is_added_with_its_coefficient(
    config: type[GrpoLoss] | type[GspoLoss],
) -> None:
    """k2 of 0.4, 0 and 0.2 is 0.08, 0 and 0.02: 0.5 * the mean over sequences of token means."""
    policy = torch.zeros(5, requires_grad=True)
    ref = torch.tensor([math.nan, 0.4, 0.0, 7.0, 0.2])
    with_kl = _run(config(kl=KlPenalty(coefficient=0.5, estimator="k2")), policy, ref_logprobs=ref)
    without = _run(config(), policy)
    assert (with_kl.loss - without.loss).item() == pytest.approx(0.5 * (0.04 + 0.02) / 2)
    assert with_kl.metrics["loss/kl/mean"].item() == pytest.approx(0.5 * (0.04 + 0.02) / 2)
    assert with_kl.metrics["loss/policy/mean"].item() == without.loss.item()
    assert with_kl.metrics["kl/ref/mean"].item() == pytest.approx(0.1 / 3)
    gradient = _gradient(with_kl.loss, policy) - _gradient(without.loss, policy)
    torch.testing.assert_close(gradient, torch.tensor([0.0, -0.05, 0.0, 0.0, -0.05]))


def test_the_rollout_correction_weights_each_token() -> None:
    """Weights 2 (truncated from e), 1 (a gap) and e^-0.5 on token losses -1.1, -1.28 and 1.8."""
    rollout = torch.tensor([0.0, -1.0, math.nan, 0.0, 0.5])
    share = _run(DapoLoss(rollout_correction=TokenTruncation(cap=2.0)), rollout_logprobs=rollout)
    weight = math.exp(-0.5)
    assert share.loss.item() == pytest.approx((2 * -1.1 - 1.28 + weight * 1.8) / 3)
    assert share.metrics["correction/weight/mean"].item() == pytest.approx((3 + weight) / 3)
    assert share.metrics["correction/at_cap/fraction"].item() == pytest.approx(1 / 3)
    assert share.metrics["mismatch/gap/fraction"].item() == pytest.approx(1 / 3)
    assert all(torch.isfinite(value) for value in share.metrics.values())


def test_the_rollout_correction_of_gspo_weights_the_sequences_tokens() -> None:
    """Weights 2 and 1 on a sequence with loss -1.2, and 5/3 on one with 1.8."""
    rollout = torch.tensor([0.0, -1.0, 0.0, 0.0, math.log(0.6)])
    config = GspoLoss(clip_low=0.2, clip_high=0.2, rollout_correction=TokenTruncation(cap=2.0))
    share = _run(config, rollout_logprobs=rollout)
    assert share.loss.item() == pytest.approx((1.5 * -1.2 + 3.0) / 2)


def test_without_a_correction_rollout_logprobs_change_no_loss() -> None:
    """They are looked at, for the mismatch metrics, and nothing else."""
    share = _run(GrpoLoss(), rollout_logprobs=torch.full((5,), -3.0))
    assert share.loss.item() == _run(GrpoLoss()).loss.item()
    assert share.metrics["mismatch/logprob/mean"].item() == pytest.approx(3.0)


@pytest.mark.parametrize(
    "config",
    [
        GrpoLoss(
            dual_clip=3.0,
            kl=KlPenalty(coefficient=0.1),
            rollout_correction=TokenTruncation(),
        ),
        GspoLoss(kl=KlPenalty(coefficient=0.1, estimator="k2")),
        DapoLoss(rollout_correction=TokenTruncation()),
    ],
    ids=["grpo", "gspo", "dapo"],
)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_outside_the_mask_has_no_influence(config: PolicyLoss, garbage: float) -> None:
    """A10: garbage in every input outside the mask moves neither loss, metric nor gradient."""

    def run(filler: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(3)

        def logprobs() -> Tensor:
            return torch.where(MASK, -torch.rand(5, generator=generator), filler)

        policy = logprobs().requires_grad_()
        share = policy_loss(
            policy,
            proximal_logprobs=logprobs(),
            advantages=ADVANTAGES,
            loss_mask=MASK,
            sequences=SEQUENCES,
            config=config,
            counts=COUNTS,
            rollout_logprobs=logprobs(),
            ref_logprobs=None if isinstance(config, DapoLoss) else logprobs(),
        )
        return share.loss.detach(), _gradient(share.loss, policy), share.metrics

    expected, actual = run(0.0), run(garbage)
    assert actual[0].equal(expected[0])
    assert actual[1].equal(expected[1])
    assert actual[1][~MASK].tolist() == [0.0, 0.0]
    assert actual[2] == expected[2]


@pytest.mark.parametrize(
    "config", [GrpoLoss(), DapoLoss(), GspoLoss()], ids=["grpo", "dapo", "gspo"]
)
def test_a_micro_batch_with_nothing_to_learn_gives_zero(config: PolicyLoss) -> None:
    """A11: loss and gradient 0, the backward pass still runs, though all inputs are NaN."""
    policy = torch.full((5,), math.nan, requires_grad=True)
    share = policy_loss(
        policy,
        proximal_logprobs=torch.full((5,), math.nan),
        advantages=torch.full((2,), math.nan),
        loss_mask=torch.zeros(5, dtype=torch.bool),
        sequences=SEQUENCES,
        config=config,
        counts=COUNTS,
    )
    share.loss.backward()
    assert share.loss.item() == 0.0
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0] * 5
    assert all(value.item() == 0.0 for value in share.metrics.values())


def test_a_wrong_dtype_is_refused_without_the_checker_too() -> None:
    """A mask of 0 and 1 is no mask, and a mask in the place of logprobs would count as 0 and 1."""
    behind_the_checker: Callable[..., LossShare] = inspect.unwrap(policy_loss)
    fixed = {
        "advantages": ADVANTAGES,
        "sequences": SEQUENCES,
        "config": DapoLoss(),
        "counts": COUNTS,
    }
    with pytest.raises(ValueError, match=r"expected loss_mask of torch.bool, got torch.int64"):
        behind_the_checker(_policy(), proximal_logprobs=None, loss_mask=MASK.long(), **fixed)
    with pytest.raises(ValueError, match=r"proximal_logprobs of a float dtype, got torch.bool"):
        behind_the_checker(_policy(), proximal_logprobs=MASK, loss_mask=MASK, **fixed)
    with pytest.raises(ValueError, match=r"expected loss_mask on cpu, .* got meta"):
        behind_the_checker(_policy(), proximal_logprobs=None, loss_mask=MASK.to("meta"), **fixed)


@pytest.mark.parametrize(
    "config", [GrpoLoss(), DapoLoss(), GspoLoss()], ids=["grpo", "dapo", "gspo"]
)
def test_only_the_policy_gets_a_gradient(config: PolicyLoss) -> None:
    """Proximal log-probabilities and advantages are data, even if their tensors require grad."""
    policy = _policy()
    proximal = torch.zeros(5, requires_grad=True)
    advantages = ADVANTAGES.clone().requires_grad_()
    policy_loss(
        policy,
        proximal_logprobs=proximal,
        advantages=advantages,
        loss_mask=MASK,
        sequences=SEQUENCES,
        config=config,
        counts=COUNTS,
    ).loss.backward()
    assert policy.grad is not None
    assert proximal.grad is None
    assert advantages.grad is None


def test_a_missing_or_useless_tensor_is_refused() -> None:
    """What the configuration needs must be there, and what it cannot read must not."""
    with pytest.raises(ValueError, match=r"rollout_correction is set and needs rollout_logprobs"):
        _run(GrpoLoss(rollout_correction=TokenTruncation()))
    with pytest.raises(ValueError, match=r"kl is set and needs ref_logprobs"):
        _run(GspoLoss(kl=KlPenalty(coefficient=0.1)))
    with pytest.raises(ValueError, match=r"this DapoLoss has no KL term that would read them"):
        _run(DapoLoss(), ref_logprobs=torch.zeros(5))


def test_wrong_shapes_are_refused_without_the_checker_too() -> None:
    """Advantages per token, or a mask of another length, would broadcast into a wrong number."""
    # As users call it: the function behind the checker.
    behind_the_checker: Callable[..., LossShare] = inspect.unwrap(policy_loss)
    assert behind_the_checker is not policy_loss
    unchecked = partial(
        behind_the_checker,
        _policy(),
        proximal_logprobs=None,
        sequences=SEQUENCES,
        config=GrpoLoss(),
        counts=COUNTS,
    )
    with pytest.raises(ValueError, match=r"advantages of shape \(2,\), one per sequence, got \(5,"):
        unchecked(advantages=torch.zeros(5), loss_mask=MASK)
    with pytest.raises(ValueError, match=r"loss_mask of shape \(5,\).* got \(1,\)"):
        unchecked(advantages=ADVANTAGES, loss_mask=MASK[:1])
