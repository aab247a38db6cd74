"""The contract that every engine meets."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig
from rl_contracts.testing.engine_contract import ENGINE_CHECKS, EngineCheck, EngineUnderTest

SaveModel = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_it_meets_the_contract(save_model: SaveModel, check: EngineCheck, kind: str) -> None:
    """Each check of `rl_contracts.testing` holds of a tiny Qwen3 and a tiny Qwen3-MoE."""
    config = FsdpConfig(
        model_path=str(save_model(kind)),
        optim=OptimConfig(learning_rate=1e-3),
        compute_dtype="float32",
    )

    def make() -> FsdpEngine:
        return FsdpEngine(config, device=torch.device("cpu"))

    check(EngineUnderTest(make=make, vocab_size=37))
