"""An engine, rows and a loss for the tests of one process."""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig
from rl_contracts.packing import pack
from rl_contracts.rollout import PolicyVersion, Trajectory
from rl_contracts.train import LossOutput, PackedBatch

CPU = torch.device("cpu")


def make_engine(folder: Path, **changes: object) -> FsdpEngine:
    """An engine in float32 on the CPU, with changes to its config."""
    settings: dict[str, object] = {
        "model_path": str(folder),
        "optim": OptimConfig(learning_rate=0.01),
        "compute_dtype": "float32",
        **changes,
    }
    return FsdpEngine(FsdpConfig(**settings), device=CPU)  # type: ignore[arg-type]


def make_trajectory(name: str, *, prompt: int, sampled: int) -> Trajectory:
    """A row whose tokens follow from its name."""
    length = prompt + sampled
    return Trajectory(
        trajectory_id=name,
        group_id="group",
        token_ids=tuple((len(name) + 5 * place) % 37 for place in range(length)),
        loss_mask=(False,) * prompt + (True,) * sampled,
        rollout_logprobs=(0.0,) * length,
        oldest_version=PolicyVersion(0),
        newest_version=PolicyVersion(0),
    )


def make_batches(max_tokens: int = 100) -> list[PackedBatch]:
    """Three rows of 7, 7 and 4 tokens, 12 of them sampled."""
    rows = [
        make_trajectory("a", prompt=3, sampled=4),
        make_trajectory("bb", prompt=1, sampled=6),
        make_trajectory("ccc", prompt=2, sampled=2),
    ]
    return pack(rows, [1.0, -1.0, 2.0], max_tokens=max_tokens)[0]


def plain_loss(policy_logprobs: Float[Tensor, " tokens"], batch: PackedBatch) -> LossOutput:
    """Minus log-probability times advantage, over the 12 sampled tokens."""
    per_token = batch.advantages.repeat_interleave(batch.cu_seqlens.diff())
    return LossOutput(loss=-(policy_logprobs * per_token).sum() / 12, metrics={})


def weights_of(engine: FsdpEngine) -> dict[str, Tensor]:
    """What it exports, by name."""
    return dict(engine.export_weights())
