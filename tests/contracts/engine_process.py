"""Runs every engine check on one engine and prints the outcomes as JSON; a process of its own.

VeOmni changes how plain transformers models behave in its process, so engines do not share one.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from parallel_state import ParallelState
from parallel_state.process_group import init_process_group
from rl_contracts.testing import ENGINE_CHECKS, EngineUnderTest
from rl_contracts.testing.engine_contract import CheckpointableEngine

VOCAB_SIZE = 50
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def dense_model(folder: Path) -> None:
    """A random Qwen3 with tied embeddings."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).save_pretrained(folder)


def expert_model(folder: Path) -> None:
    """A random Qwen3-MoE."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def fsdp(folder: Path) -> Callable[[], CheckpointableEngine]:
    """Engines of engine-fsdp."""
    from engine_fsdp import FsdpConfig, FsdpEngine, OptimConfig  # noqa: PLC0415

    dense_model(folder)
    init_process_group()
    config = FsdpConfig(
        model_path=str(folder),
        optim=OptimConfig(learning_rate=1e-3, max_grad_norm=None),
        compute_dtype="float32",
    )
    return lambda: FsdpEngine(config, device=torch.device("cpu"))


def veomni(folder: Path) -> Callable[[], CheckpointableEngine]:
    """Engines of engine-veomni."""
    from engine_veomni import OptimConfig, VeomniConfig, VeomniEngine  # noqa: PLC0415

    expert_model(folder)
    init_process_group()
    config = VeomniConfig(
        model_path=str(folder),
        optim=OptimConfig(learning_rate=1e-3, max_grad_norm=None),
        compute_dtype="float32",
        parallel=ParallelState(),
    )
    return lambda: VeomniEngine(config, device=torch.device("cpu"))


def main(name: str, results: Path) -> None:
    """Run the checks of one engine."""
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        make = {"fsdp": fsdp, "veomni": veomni}[name](Path(folder))
        for check in ENGINE_CHECKS:
            try:
                check(EngineUnderTest(make=make, vocab_size=VOCAB_SIZE))
            except AssertionError as error:
                outcomes[check.__name__] = f"failed: {error}"
            else:
                outcomes[check.__name__] = "passed"
            results.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
