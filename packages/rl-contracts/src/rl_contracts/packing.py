"""From trajectories to packed micro-batches by token budget, and back.

Every rank gets the same number of micro-batches, since engines meet in collectives once per
micro-batch: a rank that ran out would leave the others waiting. Where there are too few rows, a
micro-batch holds one token outside the loss mask instead.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_contracts.packed_images import pack_images
from rl_contracts.rollout import Trajectory
from rl_contracts.train import PackedBatch

PADDING_ID = "<padding>"
"""Trajectory id of the one-token row in a micro-batch that has nothing to train on."""


def pack(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    *,
    max_tokens: int,
    num_ranks: int = 1,
) -> list[list[PackedBatch]]:
    """Pack whole trajectories into as few micro-batches as fit, with token counts close together.

    Longest first, each trajectory goes to the micro-batch that holds the fewest tokens. The result
    depends on the arguments alone, so every rank may call this and take its own part.

    Args:
        trajectories: the rows, with unique ids.
        advantages: one per trajectory, in reward units.
        max_tokens: the most tokens in one micro-batch.
        num_ranks: data-parallel ranks to deal the micro-batches to.

    Returns:
        ``[rank][micro-batch]``, the same number for each rank. Rows in a micro-batch keep the order
        in which they were given; `unpack` restores it over all of them.

    Raises:
        ValueError: for no trajectories, a number of advantages that differs, an id that occurs
            twice, or a trajectory longer than `max_tokens`; the message holds the numbers.
    """
    _check(trajectories, advantages, max_tokens=max_tokens, num_ranks=num_ranks)
    total = sum(len(trajectory.token_ids) for trajectory in trajectories)
    per_rank = max(1, -(-total // (max_tokens * num_ranks)))
    # Ends at the latest when every row has a micro-batch of its own.
    while (bins := _fill(trajectories, per_rank * num_ranks, max_tokens)) is None:
        per_rank += 1
    batches = [
        _batch([trajectories[index] for index in rows], [advantages[index] for index in rows])
        if rows
        else _padding(trajectories[0])
        for rows in bins
    ]
    return [batches[rank::num_ranks] for rank in range(num_ranks)]


def unpack(
    values: Sequence[Tensor], batches: Sequence[PackedBatch], *, trajectory_ids: Sequence[str]
) -> list[Tensor]:
    """Cut per-token tensors into one per trajectory, in the order asked for.

    Args:
        values: one ``[tokens]`` tensor per micro-batch, such as an engine's `logprobs`.
        batches: the micro-batches that they belong to, in the same order.
        trajectory_ids: the order wanted; rows of the batches that are not in it are left out.

    Returns:
        One ``[tokens of the trajectory]`` tensor per id; views of `values`.

    Raises:
        ValueError: for another number of tensors than batches, another number of tokens, or an id
            that no batch holds.
    """
    if len(values) != len(batches):
        message = f"unpack: expected one tensor per batch, got {len(values)} for {len(batches)}"
        raise ValueError(message)
    by_id: dict[str, Tensor] = {}
    for index, (value, batch) in enumerate(zip(values, batches, strict=True)):
        if value.shape[:1] != batch.token_ids.shape:
            message = (
                f"unpack: expected {batch.token_ids.shape[0]} entries for batch {index}, one per "
                f"token, got a tensor of shape {tuple(value.shape)}"
            )
            raise ValueError(message)
        lengths: list[int] = batch.cu_seqlens.diff().tolist()
        by_id.update(zip(batch.trajectory_ids, value.split(lengths), strict=True))
    if missing := [name for name in trajectory_ids if name not in by_id]:
        message = (
            f"unpack: {len(missing)} of {len(trajectory_ids)} trajectories are in none of the "
            f"{len(batches)} batches, such as {missing[0]!r}; give the batches of all ranks"
        )
        raise ValueError(message)
    return [by_id[name] for name in trajectory_ids]


def _check(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    *,
    max_tokens: int,
    num_ranks: int,
) -> None:
    if num_ranks < 1:
        message = f"pack: expected num_ranks of at least 1, got {num_ranks}"
        raise ValueError(message)
    if not trajectories:
        message = "pack: expected at least one trajectory, got none"
        raise ValueError(message)
    if len(advantages) != len(trajectories):
        message = (
            f"pack: expected one advantage per trajectory, got {len(advantages)} for "
            f"{len(trajectories)} trajectories"
        )
        raise ValueError(message)
    routed = [row.routed_experts for row in trajectories if row.routed_experts is not None]
    sizes = sorted({routes.shape[1:] for routes in routed})
    if routed and (len(routed) != len(trajectories) or len(sizes) != 1):
        message = (
            "pack: expected routed_experts of all trajectories or of none, and as many layers and "
            f"experts per token in each, got those of {len(routed)} of {len(trajectories)}, of "
            f"sizes {', '.join(map(str, sizes))}"
        )
        raise ValueError(message)
    seen: set[str] = set()
    for trajectory in trajectories:
        name, num_tokens = trajectory.trajectory_id, len(trajectory.token_ids)
        if name in seen or name == PADDING_ID:
            message = f"pack: trajectory id {name!r} is taken; ids must be unique to lead back"
            raise ValueError(message)
        seen.add(name)
        if not 1 <= num_tokens <= max_tokens:
            message = (
                f"pack: trajectory {name} has {num_tokens} tokens, expected 1 to max_tokens = "
                f"{max_tokens}; raise max_tokens or sample shorter completions"
            )
            raise ValueError(message)


def _fill(
    trajectories: Sequence[Trajectory], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Rows of each micro-batch, or None if this many micro-batches are too few."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    held = [0] * num_bins
    longest_first = sorted(
        range(len(trajectories)), key=lambda index: (-len(trajectories[index].token_ids), index)
    )
    for index in longest_first:
        emptiest = min(range(num_bins), key=held.__getitem__)
        held[emptiest] += len(trajectories[index].token_ids)
        if held[emptiest] > max_tokens:
            return None
        bins[emptiest].append(index)
    return [sorted(rows) for rows in bins]


def _batch(trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> PackedBatch:
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    return PackedBatch(
        token_ids=torch.tensor([token for row in trajectories for token in row.token_ids]),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        loss_mask=torch.tensor([entry for row in trajectories for entry in row.loss_mask]),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        rollout_logprobs=torch.tensor(
            [logprob for row in trajectories for logprob in row.rollout_logprobs],
            dtype=torch.float32,
        ),
        trajectory_ids=tuple(row.trajectory_id for row in trajectories),
        routed_experts=_routes(trajectories),
        images=pack_images(trajectories),
    )


def _routes(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """The experts of each token, and -1 for those of the last token of each row."""
    pieces = []
    for row in trajectories:
        if row.routed_experts is None:
            return None  # of all rows, see `_check`
        known = torch.tensor(row.routed_experts, dtype=torch.int16)
        pieces += [known, known.new_full((1, *known.shape[1:]), -1)]
    return torch.cat(pieces)


def _padding(like: Trajectory) -> PackedBatch:
    routes = _routes([like])
    return PackedBatch(
        token_ids=torch.tensor([like.token_ids[0]]),
        positions=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        advantages=torch.zeros(1),
        rollout_logprobs=torch.zeros(1),
        trajectory_ids=(PADDING_ID,),
        routed_experts=None if routes is None else routes[-1:],
    )
