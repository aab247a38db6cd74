"""Returns and generalised advantages per token, for rewards or values that differ along a sequence.

All of it steps from one token of the loss mask to the next one of the same sequence. What stands
between two of them (a tool's answer, another turn's prompt) is passed over: it neither ends the
return nor discounts it, so that the tokens before a tool call get their share of what came after.

    mask      1     0     1
    reward    0     .     1
    return    0.5   .     1      with discount 0.5

Sources: Sutton and Barto 2018, "Reinforcement Learning", section 3.3, for returns; Schulman et
al. 2015, "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
arXiv:1506.02438, eq. 16.
"""

from collections.abc import Callable
from typing import NamedTuple, final

import attrs
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from algos_gspo_dapo_grpo.precision import at_least_float32
from algos_gspo_dapo_grpo.sequences import Sequences
from algos_gspo_dapo_grpo.shapes import check_one_shape


def outcome_token_rewards(
    rewards: Float[Tensor, " sequences"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
) -> Float[Tensor, "*layout"]:
    """Rewards per token that pay each sequence's reward at its last token in the mask.

    In reward units, float32 or better, 0 everywhere else. A sequence without a token in the mask
    is paid nothing.
    """
    rewards = at_least_float32(rewards)
    ones = loss_mask.to(rewards.dtype)
    places = torch.arange(ones.numel(), device=ones.device).reshape(ones.shape)
    last = torch.full((sequences.num_sequences,), -1, dtype=torch.int64, device=ones.device)
    last = last.scatter_reduce(
        0,
        sequences.sequence_ids.reshape(-1).to(torch.int64),
        torch.where(loss_mask, places, -1).reshape(-1),
        "amax",
    )
    is_last = loss_mask & (places == last[sequences.sequence_ids])
    return torch.where(is_last, sequences.spread(rewards), 0.0)


def reward_to_go(
    token_rewards: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    discount: float = 1.0,
) -> Float[Tensor, "*layout"]:
    """``G_t = r_t + discount * G_(next token of the mask)``, in reward units.

    Args:
        token_rewards: paid at tokens of the mask; what stands elsewhere is ignored.
        loss_mask: True on the sampled tokens.
        sequences: boundaries; nothing flows across them.
        discount: from 0 to 1, per token of the mask. Default: 1, as usual for finite text.

    Returns:
        float32 or better, without gradient; 0 outside the mask. Reads the length of the longest
        sequence from the device: call it once per step, where advantages are made.

    Raises:
        ValueError: if the discount is not from 0 to 1.
    """
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"reward_to_go: expected discount from 0 to 1, got {discount}")
    rewards = at_least_float32(token_rewards.detach())

    def step(following: Tensor, reward: Tensor) -> Tensor:
        return reward + discount * following

    return _backwards(step, rewards, loss_mask, sequences)


@final
@attrs.frozen(kw_only=True)
class Gae:
    """Generalised advantage estimation."""

    discount: float = attrs.field(
        default=1.0, validator=[attrs.validators.ge(0.0), attrs.validators.le(1.0)]
    )
    """Per token of the mask, the paper's gamma. Default: 1, as verl and TRL have it for text."""

    trace: float = attrs.field(
        default=0.95, validator=[attrs.validators.ge(0.0), attrs.validators.le(1.0)]
    )
    """The paper's lambda: 0 trusts the values, 1 the rewards.

    Default: 0.95, as PPO (arXiv:1707.06347, table 3) and TRL.
    """

    @trace.validator
    def _acts(self, _: object, value: float) -> None:
        if self.discount == 0.0 and value != 0.0:
            raise ValueError(
                f"Gae: trace {value} has no effect with discount 0, which ends every return at its "
                "own token; set trace to 0 as well"
            )


class GaeEstimate(NamedTuple):
    """What PPO trains on."""

    advantages: Float[Tensor, "*layout"]
    """For the policy, in reward units; not whitened, see `whitened`."""

    returns: Float[Tensor, "*layout"]
    """For the value function, in reward units: ``advantage + value``."""


def gae(
    token_rewards: Float[Tensor, "*layout"],
    values: Float[Tensor, "*layout"],
    loss_mask: Bool[Tensor, "*layout"],
    sequences: Sequences,
    *,
    config: Gae,
) -> GaeEstimate:
    """Generalised advantages and returns (arXiv:1506.02438, eq. 16).

    Args:
        token_rewards: paid at tokens of the mask; what stands elsewhere is ignored.
        values: the value function's estimate before each token, in reward units; ignored outside
            the mask. After a sequence's last token the value is 0.
        loss_mask: True on the sampled tokens.
        sequences: boundaries; nothing flows across them.
        config: discount and trace.

    Returns:
        Both float32 or better, without gradient, 0 outside the mask. Reads the length of the
        longest sequence from the device, as `reward_to_go` does.
    """
    check_one_shape("gae", token_rewards=token_rewards, values=values)
    rewards = at_least_float32(token_rewards.detach())
    values = at_least_float32(values.detach()).to(rewards.dtype)

    def next_value(following: Tensor, value: Tensor) -> Tensor:
        del following
        return value

    following_values = _backwards(next_value, values, loss_mask, sequences, shifted=True)
    surprises = rewards + config.discount * following_values - values

    def step(following: Tensor, surprise: Tensor) -> Tensor:
        return surprise + config.discount * config.trace * following

    advantages = _backwards(step, surprises, loss_mask, sequences)
    return GaeEstimate(advantages, torch.where(loss_mask, advantages + values, 0.0))


def _backwards(
    step: Callable[[Tensor, Tensor], Tensor],
    values: Tensor,
    loss_mask: Tensor,
    sequences: Sequences,
    *,
    shifted: bool = False,
) -> Tensor:
    """Fold each sequence's masked tokens from its last to its first, all sequences at once.

    `shifted` gives each token what its follower got, and the last token 0.
    """
    check_one_shape("returns", values=values, loss_mask=loss_mask, sequences=sequences.sequence_ids)
    mask = loss_mask.reshape(-1)
    flat = torch.where(mask, values.reshape(-1), 0.0)
    counted = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)])
    ids = sequences.sequence_ids.reshape(-1)
    index = counted[1:] - 1 - counted[sequences.offsets[:-1]][ids]  # among the mask's tokens
    length = int((index[mask]).amax()) + 1 if bool(mask.any()) else 0
    grid = flat.new_zeros(sequences.num_sequences, length)
    grid[ids[mask], index[mask]] = flat[mask]
    columns: list[Tensor] = []
    following = flat.new_zeros(sequences.num_sequences)
    for column in reversed(range(length)):
        present = step(following, grid[:, column])
        columns.append(following if shifted else present)
        following = present
    folded = torch.stack(columns[::-1], dim=1) if columns else grid
    result = torch.zeros_like(flat)
    result[mask] = folded[ids[mask], index[mask]]
    return result.reshape(values.shape)
