"""Tiny models and a process group of one rank."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from parallel_state.process_group import init_process_group

sys.path.insert(0, str(Path(__file__).parent))

VOCAB_SIZE = 37
"""Odd, so that rows do not divide over two ranks."""

SaveModel = Callable[..., Path]
"""Save a tiny random model: kind, and changes to its config; returns the folder."""

KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}

EXPERTS: dict[str, dict[str, object]] = {
    "mixtral": {"num_local_experts": 4},
    # five experts do not divide over two ranks either
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


def save_tiny_model(
    folder: Path,
    kind: str,
    *,
    dtype: torch.dtype = torch.float32,
    std: float = 0.2,
    **changes: object,
) -> Path:
    """A model of two layers with weights large enough to give each token its own logprob."""
    config_class, model_class = KINDS[kind]
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        **EXPERTS.get(kind, {}),
        **changes,
    }
    torch.manual_seed(0)
    model = model_class(config_class(**settings))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=std)
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture
def save_model(tmp_path: Path) -> SaveModel:
    """Save into this test's folder."""

    def save(kind: str = "qwen3", **changes: object) -> Path:
        return save_tiny_model(tmp_path / kind, kind, **changes)  # type: ignore[arg-type]

    return save


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone."""
    init_process_group()
    yield
    dist.destroy_process_group()
