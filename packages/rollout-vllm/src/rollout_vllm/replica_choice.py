"""Which replica gets a prompt: the one that knows its beginning, unless it has too much to do.

Rendezvous hashing gives every prefix an order of the replicas that no other replica's coming or
going changes, and the first with room takes it (Mirrokni, Thorup and Zadimoghaddam, "Consistent
Hashing with Bounded Loads", 2016, https://arxiv.org/abs/1608.01350): no replica gets more than
`most_above_mean` times the mean.
"""

import hashlib
import math
from array import array
from collections.abc import Mapping, Sequence

PREFIX_TOKENS = 64
"""Tokens of a prompt that decide which replica may know it: a system prompt differs by then."""

MOST_ABOVE_MEAN = 1.25
"""Default of the largest share of one replica, in means."""


def choose_replica(
    prompt_ids: Sequence[int],
    loads: Mapping[int, int],
    *,
    num_samples: int,
    most_above_mean: float = MOST_ABOVE_MEAN,
) -> int:
    """The replica that a prompt goes to.

    Args:
        prompt_ids: the prompt.
        loads: samples that run on each replica that can be chosen.
        num_samples: samples to come.
        most_above_mean: largest share of one replica, in means; above 1.
    """
    mean = (sum(loads.values()) + num_samples) / len(loads)
    room = math.ceil(most_above_mean * mean)
    prefix = array("q", prompt_ids[:PREFIX_TOKENS]).tobytes()
    order = sorted(loads, key=lambda replica: _score(prefix, replica), reverse=True)
    for replica in order:
        if loads[replica] + num_samples <= room:
            return replica
    # a group that is larger than any room
    return min(order, key=loads.__getitem__)


def _score(prefix: bytes, replica: int) -> bytes:
    # not `hash`: it differs between processes
    return hashlib.blake2b(prefix, digest_size=8, key=replica.to_bytes(8, "little")).digest()
