"""What the processes of the slow tests agree on: tiny models, rows, batches, the loss."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_contracts.train import LossOutput, PackedBatch

VOCAB_SIZE = 61
TEMPERATURE = 0.7
LENGTHS = (5, 7, 3, 9, 4, 6)
ADVANTAGES = (1.0, -1.0, 0.5, -0.5, 2.0, -2.0)
PROMPT_LENGTH = 2
BATCHES = ((0, 1), (2,), (3, 4), (5,))
"""Rows of each micro-batch."""
MASKED_ROWS = (5,)
"""Rows that the loss does not look at."""
LEARNING_RATE = 0.1
EPS = 1.0
"""With an eps of 1 the first step is nearly linear in the gradient, so it shows every part."""

BALANCE = 0.5
"""Coefficient of the balancing loss where it is on: large enough to be seen in a step."""

MODEL_ARGS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SQUARE_ARGS: dict[str, Any] = {
    **MODEL_ARGS,
    "hidden_size": 3,
    "moe_intermediate_size": 3,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}
DENSE_NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
)
"""Of `MODEL_ARGS`, those that a model without experts has."""


def row(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randint(0, VOCAB_SIZE, (LENGTHS[index],), generator=generator)


def num_loss_tokens() -> int:
    return sum(
        length - PROMPT_LENGTH for index, length in enumerate(LENGTHS) if index not in MASKED_ROWS
    )


def batch(rows: tuple[int, ...]) -> PackedBatch:
    masks = []
    for index in rows:
        mask = torch.arange(LENGTHS[index]) >= PROMPT_LENGTH
        masks.append(mask & (index not in MASKED_ROWS))
    lengths = torch.tensor([0, *(LENGTHS[index] for index in rows)])
    num_tokens = int(lengths.sum())
    return PackedBatch(
        token_ids=torch.cat([row(index) for index in rows]),
        positions=torch.cat([torch.arange(LENGTHS[index]) for index in rows]),
        cu_seqlens=lengths.cumsum(0).to(torch.int32),
        loss_mask=torch.cat(masks),
        advantages=torch.tensor([ADVANTAGES[index] for index in rows]),
        rollout_logprobs=torch.zeros(num_tokens),
        trajectory_ids=tuple(f"row-{index}" for index in rows),
    )


def batches_of(rank: int, world_size: int) -> list[PackedBatch]:
    share = len(BATCHES) // world_size
    return [batch(rows) for rows in BATCHES[rank * share : (rank + 1) * share]]


def loss_fn(policy_logprobs: Tensor, batch: PackedBatch) -> LossOutput:
    if not batch.loss_mask.any():
        # as losses do that skip what they have nothing to say about: no gradient, no logprobs
        return LossOutput(loss=torch.zeros(()), metrics={"tokens": torch.zeros(())})
    weights = batch.advantages.repeat_interleave(batch.cu_seqlens.diff().long())
    loss = -(weights * policy_logprobs).sum() / num_loss_tokens()
    return LossOutput(
        loss=loss, metrics={"tokens": batch.loss_mask.sum() / torch.tensor(num_loss_tokens())}
    )


def read_folder(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
