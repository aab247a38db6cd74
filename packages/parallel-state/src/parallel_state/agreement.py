"""What the ranks of a collective have to have in common, checked before the data travels.

A collective does not look at what the others bring: with other shapes, types or orders it returns
wrong numbers, ends the process, or waits until its timeout. Here every rank says what it brings,
and all of them refuse at once.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

# torch 2.13 renamed it, and warns of the name that older versions have
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def check_group(where: str, group: object) -> None:
    """Refuse what is no process group with this rank in it.

    torch takes None for all ranks, and does nothing, in silence, on a rank that is not in a group.

    Raises:
        TypeError: with what came instead.
    """
    if not isinstance(group, dist.ProcessGroup):
        message = (
            f"{where}: expected a process group that this rank is in, such as "
            f"Meshes.group('data'), got {group!r} ({type(group).__name__})"
        )
        raise TypeError(message)


def check_orthogonal(where: str, groups: Sequence[dist.ProcessGroup]) -> None:
    """Refuse groups that share more than this rank: over both, a piece would count twice.

    Raises:
        ValueError: with the ranks of both.
    """
    for first, second in itertools.combinations(groups, 2):
        ranks = dist.get_process_group_ranks(first), dist.get_process_group_ranks(second)
        if len(set(ranks[0]) & set(ranks[1])) > 1:
            message = (
                f"{where}: expected groups that share this rank alone, got one of the ranks "
                f"{ranks[0]} and one of {ranks[1]}: give no group for an axis that the DTensor is "
                "sharded over already"
            )
            raise ValueError(message)


def gathered_ints(
    values: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> list[list[int]]:
    """The values of every rank of `group`, which all bring equally many."""
    own = torch.tensor(values, dtype=torch.int64, device=device)
    everyone = own.new_empty(dist.get_world_size(group) * own.numel())
    all_gather_single(everyone, own, group=group)
    rows: list[list[int]] = everyone.view(dist.get_world_size(group), own.numel()).tolist()
    return rows


def gathered_texts(text: str, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """The text of every rank of `group`."""
    encoded = list(text.encode())
    lengths = [row[0] for row in gathered_ints([len(encoded)], group, device)]
    padded = [*encoded, *[0] * (max(lengths) - len(encoded))]
    rows = gathered_ints(padded, group, device)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


def by_rank(texts: Sequence[str], group: dist.ProcessGroup) -> str:
    """Who said what: `ranks 0, 1: this; rank 2: that`, for the end of a message."""
    said: dict[str, list[int]] = {}
    for rank, text in zip(dist.get_process_group_ranks(group), texts, strict=True):
        said.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in said.items()
    )
