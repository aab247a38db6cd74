"""What the processes of the tests with images agree on: tiny models that see, rows, batches."""

import functools
from typing import Any, Final

import numpy as np
import torch
from scenario_data import TEMPERATURE
from torch import Tensor

from rl_contracts import PolicyVersion, Trajectory
from rl_contracts.images import ImagePatches
from rl_contracts.packing import pack
from rl_contracts.train import LossOutput, PackedBatch

__all__ = ["TEMPERATURE"]

VOCAB_SIZE = 61
IMAGE, VIDEO = 4, 5
"""Placeholders; a policy may draw them too."""
PATCH, MERGE = 4, 2
PATCH_VALUES = 3 * 2 * PATCH * PATCH

TEXT_ARGS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
EXPERT_NAMES = ("moe_intermediate_size", "num_experts", "num_experts_per_tok")
VISION_ARGS: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "out_hidden_size": 32,
    "num_position_embeddings": 9,
    "deepstack_visual_indexes": [0],
}

GRIDS: Final = ((1, 4, 4), (1, 2, 4), (1, 6, 2))
"""Of the pictures: 4, 2 and 3 tokens."""
PROMPTS: Final[tuple[tuple[int, ...], ...]] = ((0,), (0,), (1, 2), (), (2,), (1,))
"""Pictures in the prompt of each row; the first two are of one group."""
ADVANTAGES = (1.0, -1.0, 0.5, -0.5, 2.0, -2.0)
NUM_NEW = (4, 6, 3, 5, 6, 4)
MASKED_ROWS = (5,)
DRAWN_PLACEHOLDERS = {4: {1: IMAGE, 3: VIDEO}}
"""Row to place among its sampled tokens to id: what a policy may draw."""
BATCHES = ((0, 1), (2,), (3,), (4, 5))
"""Rows of each micro-batch: one has no picture, opposite one that has."""
OTHER_BATCHES = ((3, 2, 0), (1,), (5,), (4,))


def picture(number: int) -> ImagePatches:
    generator = np.random.default_rng(number)
    grid = GRIDS[number]
    values = generator.standard_normal((int(np.prod(grid)), PATCH_VALUES), dtype=np.float32)
    return ImagePatches(
        patches=values, grid=grid, first_token=0, num_tokens=len(values) // MERGE**2
    )


@functools.cache
def prompt(group: int) -> tuple[list[int], tuple[ImagePatches, ...]]:
    """Made once, so that the rows of a group share their pictures."""
    generator = torch.Generator().manual_seed(50 + group)
    words = torch.randint(6, VOCAB_SIZE, (8,), generator=generator).tolist()
    ids, shown = words[:2], []
    for number in PROMPTS[group]:
        one = picture(number)
        shown.append(
            ImagePatches(
                patches=one.patches,
                grid=one.grid,
                first_token=len(ids),
                num_tokens=one.num_tokens,
            )
        )
        ids += [IMAGE] * one.num_tokens + words[2:4]
    return ids, tuple(shown)


def row(index: int) -> Trajectory:
    group = 0 if index < 2 else index
    ids, shown = prompt(group)
    generator = torch.Generator().manual_seed(100 + index)
    new = torch.randint(6, VOCAB_SIZE, (NUM_NEW[index],), generator=generator)
    for place, token in DRAWN_PLACEHOLDERS.get(index, {}).items():
        new[place] = token
    counted = index not in MASKED_ROWS
    return Trajectory(
        trajectory_id=f"row-{index}",
        group_id=f"group-{group}",
        token_ids=(*ids, *new.tolist()),
        loss_mask=(False,) * len(ids) + (counted,) * len(new),
        rollout_logprobs=(0.0,) * (len(ids) + len(new)),
        oldest_version=PolicyVersion(0),
        newest_version=PolicyVersion(0),
        images=shown,
    )


ROWS: Final = [row(index) for index in range(len(NUM_NEW))]


def num_loss_tokens() -> int:
    return sum(sum(each.loss_mask) for each in ROWS)


def batch(rows: tuple[int, ...]) -> PackedBatch:
    chosen = [ROWS[index] for index in rows]
    [[packed]] = pack(chosen, [ADVANTAGES[index] for index in rows], max_tokens=999)
    return packed


def batches_of(
    rank: int, world_size: int, split: tuple[tuple[int, ...], ...] = BATCHES
) -> list[PackedBatch]:
    share = len(split) // world_size
    return [batch(rows) for rows in split[rank * share : (rank + 1) * share]]


def loss_fn(policy_logprobs: Tensor, batch: PackedBatch) -> LossOutput:
    weights = batch.advantages.repeat_interleave(batch.cu_seqlens.diff().long())
    loss = -(weights * policy_logprobs).sum() / num_loss_tokens()
    return LossOutput(loss=loss, metrics={})
