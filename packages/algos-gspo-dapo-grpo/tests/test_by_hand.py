"""Every loss against its formula, written out token by token in float64 and without our code."""

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from algos_gspo_dapo_grpo import (
    Aggregation,
    CispoLoss,
    DecoupledPpoLoss,
    DppoTvLoss,
    FixedNormaliser,
    GmpoLoss,
    GpgLoss,
    GrpoLoss,
    GspoLoss,
    GspoTokenLoss,
    PolicyLoss,
    SapoLoss,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    Sequences,
    SequenceTruncation,
    TokenMean,
    TokenTruncation,
    ToprLoss,
    WeightMasking,
    count_batch,
    policy_loss,
)

LENGTHS = (4, 1, 0, 6, 3)
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0)
TOKENS = sum(LENGTHS)
ADVANTAGES = (1.1, -0.7, 0.4, -1.3, 0.9)


def _near(logprobs: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(TOKENS, dtype=torch.float64, generator=generator)
    return (logprobs + 0.4 * noise).clamp(max=-1e-3)


GENERATOR = torch.Generator().manual_seed(1)
POLICY = -2.0 * torch.rand(TOKENS, dtype=torch.float64, generator=GENERATOR) - 0.05
PROXIMAL, ROLLOUT = _near(POLICY, GENERATOR), _near(POLICY, GENERATOR)
MASK = torch.rand(TOKENS, generator=GENERATOR) < 0.8
MASK[4] = True
ROWS = {
    i: [t for t in range(int(BOUNDS[i]), int(BOUNDS[i + 1])) if MASK[t]]
    for i in range(len(LENGTHS))
}
OWNER = {t: i for i, row in ROWS.items() for t in row}
LIVE = [i for i, row in ROWS.items() if row]

AGGREGATIONS: dict[str, tuple[Aggregation, Callable[[Mapping[int, Tensor]], Tensor]]] = {
    "token_mean": (TokenMean(), lambda x: _sum(x, OWNER) / len(OWNER)),
    "sequence_mean_token_mean": (
        SequenceMeanTokenMean(),
        lambda x: torch.stack([_sum(x, ROWS[i]) / len(ROWS[i]) for i in LIVE]).mean(),
    ),
    "sequence_mean_token_sum": (SequenceMeanTokenSum(), lambda x: _sum(x, OWNER) / len(LIVE)),
    "fixed": (FixedNormaliser(normaliser=7.0), lambda x: _sum(x, OWNER) / len(LIVE) / 7.0),
}


def _sum(losses: Mapping[int, Tensor], tokens: Mapping[int, int] | list[int]) -> Tensor:
    return torch.stack([losses[t] for t in tokens]).sum()


def _clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1.0 - low, 1.0 + high) * advantage)


def _geometric(policy: Tensor, i: int) -> Tensor:
    return torch.stack([policy[t] - PROXIMAL[t] for t in ROWS[i]]).mean().exp()


def _grpo(policy: Tensor, t: int, a: float) -> Tensor:
    loss = _clipped((policy[t] - PROXIMAL[t]).exp(), a, 0.1, 0.15)
    return loss if a > 0 else loss.clamp(max=1.4 * abs(a))


def _gspo(policy: Tensor, t: int, a: float) -> Tensor:
    return _clipped(_geometric(policy, OWNER[t]), a, 0.03, 0.04)


def _gspo_token(policy: Tensor, t: int, a: float) -> Tensor:
    own = (policy[t] - policy[t].detach()).exp()
    return _clipped(_geometric(policy, OWNER[t]).detach() * own, a, 0.03, 0.04)


def _cispo(policy: Tensor, t: int, a: float) -> Tensor:
    return -(policy[t] - PROXIMAL[t]).exp().clamp(0.9, 1.2).detach() * a * policy[t]


def _sapo(policy: Tensor, t: int, a: float) -> Tensor:
    tau = 1.0 if a > 0 else 1.05
    return -4.0 / tau * torch.sigmoid(tau * ((policy[t] - PROXIMAL[t]).exp() - 1.0)) * a


def _gmpo(policy: Tensor, t: int, a: float) -> Tensor:
    differences = [policy[u] - PROXIMAL[u] for u in ROWS[OWNER[t]]]
    held = [d.clamp(max=0.2) if a > 0 else d.clamp(min=-0.3) for d in differences]
    return -torch.stack(held).mean().exp() * a


def _dppo(policy: Tensor, t: int, a: float) -> Tensor:
    now, before = math.exp(policy[t].item()), math.exp(PROXIMAL[t].item())
    left_out = now - before > 0.1 if a > 0 else before - now > 0.05
    return policy[t] * (0.0 if left_out else -min(now / before, 1.3) * a)


def _gpg(policy: Tensor, t: int, a: float) -> Tensor:
    return -a * policy[t]


def _topr(policy: Tensor, t: int, a: float) -> Tensor:
    ratio = math.exp(sum((policy[u] - PROXIMAL[u]).item() for u in ROWS[OWNER[t]]))
    return -(min(ratio, 1.0) if a < 0 else 1.0) * a * policy[t]


def _mismatch(t: int) -> float:
    return math.exp((PROXIMAL[t] - ROLLOUT[t]).item())


def _decoupled(policy: Tensor, t: int, a: float) -> Tensor:
    weight = _mismatch(t) if 0.6 <= _mismatch(t) <= 1.3 else 0.0
    return weight * _clipped((policy[t] - PROXIMAL[t]).exp(), a, 0.2, 0.2)


def _gspo_token_weights(policy: Tensor, t: int, a: float) -> Tensor:
    return min(_mismatch(t), 1.2) * _gspo(policy, t, a)


def _gmpo_sequence_weights(policy: Tensor, t: int, a: float) -> Tensor:
    return min(math.prod(_mismatch(u) for u in ROWS[OWNER[t]]), 1.5) * _gmpo(policy, t, a)


MASKED = WeightMasking(level="token", low=0.6, high=1.3)
FORMULAS: dict[
    str, tuple[Callable[[Tensor, int, float], Tensor], Callable[[Aggregation], PolicyLoss]]
] = {
    "grpo": (
        _grpo,
        lambda a: GrpoLoss(clip_low=0.1, clip_high=0.15, dual_clip=1.4, aggregation=a),
    ),
    "gspo": (_gspo, lambda a: GspoLoss(clip_low=0.03, clip_high=0.04, aggregation=a)),
    "gspo_token": (
        _gspo_token,
        lambda a: GspoTokenLoss(clip_low=0.03, clip_high=0.04, aggregation=a),
    ),
    "cispo": (_cispo, lambda a: CispoLoss(clip_low=0.1, clip_high=0.2, aggregation=a)),
    "sapo": (_sapo, lambda a: SapoLoss(aggregation=a)),
    "gmpo": (_gmpo, lambda a: GmpoLoss(clip_low=0.3, clip_high=0.2, aggregation=a)),
    "dppo": (
        _dppo,
        lambda a: DppoTvLoss(threshold_low=0.05, threshold_high=0.1, max_ratio=1.3, aggregation=a),
    ),
    "gpg": (_gpg, lambda a: GpgLoss(aggregation=a)),
    "topr": (_topr, lambda a: ToprLoss(aggregation=a)),
    "decoupled": (
        _decoupled,
        lambda a: DecoupledPpoLoss(aggregation=a, rollout_correction=MASKED),
    ),
    "gspo with token weights": (
        _gspo_token_weights,
        lambda a: GspoLoss(
            clip_low=0.03,
            clip_high=0.04,
            aggregation=a,
            rollout_correction=TokenTruncation(cap=1.2),
        ),
    ),
    "gmpo with sequence weights": (
        _gmpo_sequence_weights,
        lambda a: GmpoLoss(
            clip_low=0.3,
            clip_high=0.2,
            aggregation=a,
            rollout_correction=SequenceTruncation(cap=1.5),
        ),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("mean", AGGREGATIONS)
def test_value_and_gradient_are_those_of_the_formula(name: str, mean: str) -> None:
    """To 1e-12, with an empty sequence, one of one token and holes in the mask."""
    formula, config_with = FORMULAS[name]
    aggregation, mean_of = AGGREGATIONS[mean]
    policy = POLICY.clone().requires_grad_()
    expected = mean_of({t: formula(policy, t, ADVANTAGES[i]) for t, i in OWNER.items()})
    (expected_gradient,) = torch.autograd.grad(expected, policy)

    config = config_with(aggregation)
    sequences = Sequences.packed(BOUNDS, num_tokens=TOKENS)
    loss = policy_loss(
        policy,
        proximal_logprobs=PROXIMAL,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        loss_mask=MASK,
        sequences=sequences,
        config=config,
        counts=count_batch(MASK, sequences),
        rollout_logprobs=None if config.rollout_correction is None else ROLLOUT,
    ).loss
    (gradient,) = torch.autograd.grad(loss, policy)
    torch.testing.assert_close(loss, expected, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0.0, atol=1e-12)
