"""Advantages from the rewards of a group: how much better a sample did than its siblings.

Here is the choice (`GroupAdvantages`) with its two oldest members; RLOO, GPG and MaxRL have
modules of their own.

Sources: Shao et al. 2024, GRPO, arXiv:2402.03300, section 4.1.2; Liu et al. 2025, Dr.GRPO,
arXiv:2503.20783, section 3.2.

What happens at the edges, in all of them:

- A reward that is NaN or infinite (it could not be scored) gives an advantage of exactly 0 and
  stays out of the group's baseline; so does a sample that is not accepted.
- A group with fewer than two scored samples has nothing to compare: 0, not the raw reward.
- A group of equal rewards gives exactly 0.
"""

from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal, assert_never, final

import attrs
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from algos_gspo_dapo_grpo.gpg import GpgAdvantages, gpg_advantages
from algos_gspo_dapo_grpo.groups import grouped
from algos_gspo_dapo_grpo.maxrl import MaxRlAdvantages, maxrl_advantages
from algos_gspo_dapo_grpo.rloo import RlooAdvantages, rloo_advantages
from algos_gspo_dapo_grpo.validators import positive_validator


@final
@attrs.frozen(kw_only=True)
class GrpoAdvantages:
    """``(reward - group mean) / (group std + epsilon)``."""

    kind: ClassVar[Literal["grpo"]] = "grpo"

    std: Literal["sample", "population"] = attrs.field(
        default="sample", validator=attrs.validators.in_(("sample", "population"))
    )
    """Divide the squared deviations by ``n - 1`` or by ``n``.

    The paper says "standard deviation" without more. Default: sample, as verl and TRL compute it.
    """

    epsilon: float = attrs.field(default=1e-6, validator=positive_validator)
    """Added to the standard deviation, in reward units. Default: verl's."""


@final
@attrs.frozen(kw_only=True)
class DrGrpoAdvantages:
    """``reward - group mean``, undivided, so that easy and hard prompts weigh the same."""

    kind: ClassVar[Literal["dr_grpo"]] = "dr_grpo"


GroupAdvantages = (
    GrpoAdvantages | DrGrpoAdvantages | RlooAdvantages | GpgAdvantages | MaxRlAdvantages
)
"""How rewards of a group become advantages, given rewards and groups alone.

Methods that need more have functions of their own: `opo_advantages` (lengths),
`remax_advantages` (a greedy completion's reward), `gdpo_advantages` (several rewards),
`reinforce_plus_plus_advantages` (rewards per token) and `gae` (values).
"""


def group_ids_of(keys: Sequence[Hashable]) -> Int[Tensor, " samples"]:
    """Number the groups in the order in which their keys first appear.

    The key must be the same for all samples of one prompt: the prompt's id, never the
    trajectory's, or every group has one member and no baseline.
    """
    number: dict[Hashable, int] = {}
    return torch.tensor([number.setdefault(key, len(number)) for key in keys], dtype=torch.int64)


def group_advantages(
    rewards: Float[Tensor, " samples"],
    group_ids: Int[Tensor, " samples"],
    *,
    config: GroupAdvantages,
    accepted: Bool[Tensor, " samples"] | None = None,
) -> Float[Tensor, " samples"]:
    """Advantages by the formula that `config` names; see `grpo_advantages`."""
    match config:
        case GrpoAdvantages():
            return grpo_advantages(rewards, group_ids, config=config, accepted=accepted)
        case DrGrpoAdvantages():
            return dr_grpo_advantages(rewards, group_ids, accepted=accepted)
        case RlooAdvantages():
            return rloo_advantages(rewards, group_ids, accepted=accepted)
        case GpgAdvantages():
            return gpg_advantages(rewards, group_ids, config=config, accepted=accepted)
        case MaxRlAdvantages():
            return maxrl_advantages(rewards, group_ids, config=config, accepted=accepted)
        case _:
            assert_never(config)


def grpo_advantages(
    rewards: Float[Tensor, " samples"],
    group_ids: Int[Tensor, " samples"],
    *,
    config: GrpoAdvantages,
    accepted: Bool[Tensor, " samples"] | None = None,
) -> Float[Tensor, " samples"]:
    """Rewards centred and scaled within their group (arXiv:2402.03300, section 4.1.2).

    Args:
        rewards: one per sample; NaN or infinite where there is none.
        group_ids: equal for the samples of one prompt. Any numbers, in any order; groups may
            differ in size.
        config: which standard deviation, and what is added to it.
        accepted: False for samples that are not trained on (rejected, or with an empty loss
            mask): they get 0 and stay out of the baseline. None: all are accepted.

    Returns:
        One advantage per sample, of about unit size, float32 or better; always finite.
    """
    groups = grouped(rewards, group_ids, accepted)
    centred = groups.weighted_centre()
    # Two passes: the mean is gone before anything is squared, so equal rewards leave exactly 0.
    squares = groups.sum(centred.square())
    divisor = groups.num_scored - 1.0 if config.std == "sample" else groups.num_scored
    std = torch.sqrt(squares / divisor.clamp(min=1.0))
    return centred / (std + config.epsilon)


def dr_grpo_advantages(
    rewards: Float[Tensor, " samples"],
    group_ids: Int[Tensor, " samples"],
    *,
    accepted: Bool[Tensor, " samples"] | None = None,
) -> Float[Tensor, " samples"]:
    """Rewards centred within their group and not scaled (arXiv:2503.20783, section 3.2).

    Arguments as in `grpo_advantages`.

    Returns:
        One advantage per sample, in reward units, float32 or better; always finite.
    """
    return grouped(rewards, group_ids, accepted).weighted_centre()
