"""Estimators of KL(policy || ref) from sampled tokens, and the KL term of a loss.

Source: Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html), which names
k1, k2 and k3. With ``d = ref - policy`` per token, in nats:

    k1 = -d                  unbiased; as a loss its gradient does not know ref
    k2 = d^2 / 2             biased; its gradient is that of KL(policy || ref) in expectation
    k3 = exp(d) - d - 1      unbiased, never negative; the term of GRPO (arXiv:2402.03300, eq. 4)

and, named as verl and TRL name it,

    abs = |d|                biased; its gradient knows only which way ref lies

In expectation over the policy the *value* of k1 and k3 is the KL divergence, but the *gradient*
is only for k2. A straight-through term has the value of one estimator and the gradient of k2.
"""

from typing import Literal, assert_never, final

import attrs
import torch
from jaxtyping import Float
from torch import Tensor

from algos_gspo_dapo_grpo.precision import at_least_float32
from algos_gspo_dapo_grpo.shapes import check_one_shape
from algos_gspo_dapo_grpo.surrogate import LOG_RATIO_CAP
from algos_gspo_dapo_grpo.validators import positive_validator

K3_CAP = 10.0
"""Largest value of k3, in nats: reached at d = 2.61 and d = -11. Beyond it the gradient is 0.

The same cap as verl's ``low_var_kl`` (verl/trainer/ppo/core_algos.py).
"""


def kl_k1(
    policy_logprobs: Float[Tensor, "*layout"], ref_logprobs: Float[Tensor, "*layout"]
) -> Float[Tensor, "*layout"]:
    """``policy - ref`` per token, in nats: an estimate to look at or to put into a reward.

    Not a loss: its gradient with respect to `policy_logprobs` is 1, whatever ref says.
    """
    check_one_shape("KL", policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs)
    return at_least_float32(policy_logprobs) - at_least_float32(ref_logprobs)


def kl_k2(
    policy_logprobs: Float[Tensor, "*layout"], ref_logprobs: Float[Tensor, "*layout"]
) -> Float[Tensor, "*layout"]:
    """``(policy - ref)^2 / 2`` per token, in nats^2; its gradient is ``policy - ref``."""
    return 0.5 * kl_k1(policy_logprobs, ref_logprobs).square()


def kl_k3(
    policy_logprobs: Float[Tensor, "*layout"], ref_logprobs: Float[Tensor, "*layout"]
) -> Float[Tensor, "*layout"]:
    """``exp(d) - d - 1`` with ``d = ref - policy`` per token, in nats, at most `K3_CAP`.

    The log ratio is capped before the exponential and the value after it, so that value and
    gradient are finite for every finite input. Values below the cap are untouched.
    """
    difference = torch.clamp(-kl_k1(policy_logprobs, ref_logprobs), -LOG_RATIO_CAP, LOG_RATIO_CAP)
    # expm1 keeps the digits that exp(d) - 1 loses at small d, where k3 is about d^2 / 2.
    return torch.clamp(torch.expm1(difference) - difference, max=K3_CAP)


def kl_abs(
    policy_logprobs: Float[Tensor, "*layout"], ref_logprobs: Float[Tensor, "*layout"]
) -> Float[Tensor, "*layout"]:
    """``|policy - ref|`` per token, in nats; its gradient is the sign of ``policy - ref``."""
    return kl_k1(policy_logprobs, ref_logprobs).abs()


KlEstimator = Literal["k1", "k2", "k3", "abs"]
"""Which estimator; see the module."""

KL_ESTIMATORS = ("k1", "k2", "k3", "abs")


def kl_estimate(
    policy_logprobs: Float[Tensor, "*layout"],
    ref_logprobs: Float[Tensor, "*layout"],
    *,
    estimator: KlEstimator,
) -> Float[Tensor, "*layout"]:
    """The estimate per token that `estimator` names, in nats (k2: nats^2)."""
    match estimator:
        case "k1":
            return kl_k1(policy_logprobs, ref_logprobs)
        case "k2":
            return kl_k2(policy_logprobs, ref_logprobs)
        case "k3":
            return kl_k3(policy_logprobs, ref_logprobs)
        case "abs":
            return kl_abs(policy_logprobs, ref_logprobs)
        case _:
            assert_never(estimator)


KlLossEstimator = Literal["k2", "k3", "abs", "k1+", "k3+", "abs+"]
"""Which estimator a loss may have. With a ``+``, as verl writes it, the value is that of the
estimator before it and the gradient that of k2 (straight-through)."""

KL_LOSS_ESTIMATORS = ("k2", "k3", "abs", "k1+", "k3+", "abs+")


def _refuse_k1(_: object, __: object, value: str) -> None:
    if value == "k1":
        raise ValueError(
            "KlPenalty: estimator 'k1' has no effect as a loss: its gradient with respect to the "
            "policy is 1 whatever the reference says; use 'k2' or 'k3'"
        )
    if value not in KL_LOSS_ESTIMATORS:
        known = ", ".join(repr(name) for name in KL_LOSS_ESTIMATORS)
        raise ValueError(f"KlPenalty: expected estimator to be one of {known}; got {value!r}")


@final
@attrs.frozen(kw_only=True)
class KlPenalty:
    """A KL term in the loss, which needs `ref_logprobs`."""

    coefficient: float = attrs.field(validator=positive_validator)
    """Factor of the term, in reward units per nat. GRPO: 0.04 (arXiv:2402.03300, section 4.2)."""

    estimator: KlLossEstimator = attrs.field(default="k3", validator=_refuse_k1)
    """Which estimator. Default: k3, as GRPO has it (arXiv:2402.03300, eq. 4)."""


def kl_penalty(
    policy_logprobs: Float[Tensor, "*layout"],
    ref_logprobs: Float[Tensor, "*layout"],
    *,
    config: KlPenalty,
) -> Float[Tensor, "*layout"]:
    """The KL term per token, without its coefficient.

    `policy_logprobs` carries the gradient; `ref_logprobs` never does.
    """
    ref = ref_logprobs.detach()
    match config.estimator:
        case "k2" | "k3" | "abs":
            return kl_estimate(policy_logprobs, ref, estimator=config.estimator)
        case "k1+":
            return _with_gradient_of_k2(kl_k1(policy_logprobs, ref), policy_logprobs, ref)
        case "k3+":
            return _with_gradient_of_k2(kl_k3(policy_logprobs, ref), policy_logprobs, ref)
        case "abs+":
            return _with_gradient_of_k2(kl_abs(policy_logprobs, ref), policy_logprobs, ref)
        case _:
            assert_never(config.estimator)


def _with_gradient_of_k2(value: Tensor, policy_logprobs: Tensor, ref: Tensor) -> Tensor:
    policy = at_least_float32(policy_logprobs)
    gradient = kl_k1(policy_logprobs, ref).detach()
    # policy - policy.detach() is exactly 0, so the value keeps all its digits.
    return value.detach() + gradient * (policy - policy.detach())
