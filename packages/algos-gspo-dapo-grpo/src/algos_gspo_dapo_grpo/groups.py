"""What the rewards of a group have in common: who was scored, their mean, their sums.

A reward that is NaN or infinite could not be scored; it stays out of every sum here, and so does
a sample that is not accepted.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from algos_gspo_dapo_grpo.precision import at_least_float32


class Groups(NamedTuple):
    """The rewards of a batch, seen from their groups; every tensor has one entry per sample."""

    rewards: Float[Tensor, " samples"]
    """float32 or better; 0 where not scored."""

    scored: Bool[Tensor, " samples"]
    """The reward is finite and the sample is accepted."""

    num_scored: Float[Tensor, " samples"]
    """Scored samples of the sample's group."""

    lowest: Float[Tensor, " samples"]
    """Lowest scored reward of the group; 0 if there is none."""

    above_lowest: Float[Tensor, " samples"]
    """``reward - lowest``; 0 where not scored. Equal rewards are exact zeros here."""

    dense_ids: Int[Tensor, " samples"]
    """Number of the group, from 0, in the order of `group_ids`."""

    def sum(self, values: Float[Tensor, " samples"]) -> Float[Tensor, " samples"]:
        """For every sample the sum over its group."""
        return torch.zeros_like(values).index_add(0, self.dense_ids, values)[self.dense_ids]

    def weighted_centre(
        self, weights: Float[Tensor, " samples"] | None = None
    ) -> Float[Tensor, " samples"]:
        """``reward - weighted mean of the group``; exactly 0 where not scored.

        `weights` count for scored samples only; None gives each scored sample the weight 1. A
        group with fewer than two scored samples, or without weight, gives 0.
        """
        scored = self.scored.to(self.rewards.dtype)
        weights = scored if weights is None else weights * scored
        total = self.sum(weights)
        # A single scored sample is its own lowest reward and mean, so it needs no case.
        comparable = self.scored & (total > 0)
        mean = self.sum(weights * self.above_lowest) / torch.where(total > 0, total, 1.0)
        return torch.where(comparable, self.above_lowest - mean, 0.0)


def grouped(rewards: Tensor, group_ids: Tensor, accepted: Tensor | None) -> Groups:
    """Sort the rewards into their groups, without waiting for a device.

    Raises:
        ValueError: if the tensors are not one entry per sample each, or group ids are no integers.
    """
    check_per_sample("rewards", rewards, like=rewards)
    check_per_sample("group_ids", group_ids, like=rewards)
    if group_ids.is_floating_point() or group_ids.dtype == torch.bool:
        raise ValueError(
            f"advantages: expected group_ids of an integer dtype, got {group_ids.dtype}; "
            "group_ids_of makes them of prompt ids"
        )
    if accepted is not None:
        check_accepted(accepted, like=rewards)
    rewards = at_least_float32(rewards.detach())
    scored = torch.isfinite(rewards)
    if accepted is not None:
        scored = scored & accepted
    dense_ids = _dense(group_ids)
    # Measured from the group's lowest reward: equal rewards become exact zeros, and large common
    # offsets cost no digits.
    lowest = torch.full_like(rewards, torch.inf).scatter_reduce(
        0, dense_ids, torch.where(scored, rewards, torch.inf), "amin"
    )[dense_ids]
    lowest = torch.where(torch.isfinite(lowest), lowest, 0.0)
    ones = scored.to(rewards.dtype)
    return Groups(
        rewards=torch.where(scored, rewards, 0.0),
        scored=scored,
        num_scored=torch.zeros_like(ones).index_add(0, dense_ids, ones)[dense_ids],
        lowest=lowest,
        above_lowest=torch.where(scored, rewards - lowest, 0.0),
        dense_ids=dense_ids,
    )


def check_per_sample(name: str, values: Tensor, *, like: Tensor) -> None:
    """Refuse what is not one entry per reward; broadcasting would make a wrong number of it."""
    if values.ndim != 1 or values.shape != like.shape:
        raise ValueError(
            f"advantages: expected {name} of shape ({like.numel()},), one per sample, got "
            f"{tuple(values.shape)}"
        )


def check_accepted(accepted: Tensor, *, like: Tensor) -> None:
    """Refuse what is not one bool per reward."""
    check_per_sample("accepted", accepted, like=like)
    if accepted.dtype != torch.bool:
        raise ValueError(f"advantages: expected accepted of dtype torch.bool, got {accepted.dtype}")


def _dense(group_ids: Int[Tensor, " samples"]) -> Int[Tensor, " samples"]:
    """Number the groups from 0; torch.unique would wait for the device to learn how many."""
    order = torch.argsort(group_ids, stable=True)
    ordered = group_ids[order]
    starts_group = torch.ones_like(ordered)
    starts_group[1:] = (ordered[1:] != ordered[:-1]).to(ordered.dtype)
    return torch.empty_like(order).scatter(0, order, starts_group.cumsum(0) - 1)
