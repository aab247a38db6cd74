"""Models for the benchmark of weight updates: their sizes, and weights without a trainer."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_vllm.headers import TensorHeader


class ModelSizes(NamedTuple):
    """Sizes of a Qwen3 or, with experts, a Qwen3-MoE."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    expert_intermediate: int = 0
    active_experts: int = 0


_TINY_VOCAB = 512

SIZES: Mapping[str, ModelSizes] = {
    "tiny": ModelSizes(_TINY_VOCAB, 256, 512, 2, 4, 2, 64),
    "tiny-moe": ModelSizes(_TINY_VOCAB, 256, 512, 2, 4, 2, 64, 8, 128, 2),
    # https://huggingface.co/Qwen/Qwen3-8B and Qwen3-30B-A3B, config.json
    "qwen3-8b": ModelSizes(151936, 4096, 12288, 36, 32, 8, 128),
    "qwen3-30b-a3b": ModelSizes(151936, 2048, 6144, 48, 32, 4, 128, 128, 768, 8),
}


def hf_config(sizes: ModelSizes) -> dict[str, object]:
    """What stands in config.json."""
    common: dict[str, object] = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": 4096,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if not sizes.experts:
        return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **common}
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **common,
        "moe_intermediate_size": sizes.expert_intermediate,
        "num_experts": sizes.experts,
        "num_experts_per_tok": sizes.active_experts,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def make_weights(sizes: ModelSizes, device: torch.device, *, seed: int) -> dict[str, Tensor]:
    """Random weights under their Hugging Face names; experts one by one, as views of stacks."""
    torch.manual_seed(seed)
    weights: dict[str, Tensor] = {}
    scale = 4.0 / sizes.hidden**0.5 * 0.6 if sizes.vocab == _TINY_VOCAB else 0.02

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, scale)

    def ones(length: int) -> Tensor:
        return torch.ones(length, dtype=torch.bfloat16, device=device)

    weights["model.embed_tokens.weight"] = normal(sizes.vocab, sizes.hidden)
    for layer in range(sizes.layers):
        stem = f"model.layers.{layer}."
        weights[f"{stem}input_layernorm.weight"] = ones(sizes.hidden)
        for name, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads)):
            shape = (heads * sizes.head_dim, sizes.hidden)
            weights[f"{stem}self_attn.{name}_proj.weight"] = normal(*shape)
        shape = (sizes.hidden, sizes.heads * sizes.head_dim)
        weights[f"{stem}self_attn.o_proj.weight"] = normal(*shape)
        weights[f"{stem}self_attn.q_norm.weight"] = ones(sizes.head_dim)
        weights[f"{stem}self_attn.k_norm.weight"] = ones(sizes.head_dim)
        weights[f"{stem}post_attention_layernorm.weight"] = ones(sizes.hidden)
        mlp = f"{stem}mlp."
        if sizes.experts:
            width = sizes.expert_intermediate
            weights[f"{mlp}gate.weight"] = normal(sizes.experts, sizes.hidden)
            gate_up = normal(sizes.experts, 2 * width, sizes.hidden)
            down = normal(sizes.experts, sizes.hidden, width)
            for expert in range(sizes.experts):
                weights[f"{mlp}experts.{expert}.gate_proj.weight"] = gate_up[expert, :width]
                weights[f"{mlp}experts.{expert}.up_proj.weight"] = gate_up[expert, width:]
                weights[f"{mlp}experts.{expert}.down_proj.weight"] = down[expert]
        else:
            weights[f"{mlp}gate_proj.weight"] = normal(sizes.intermediate, sizes.hidden)
            weights[f"{mlp}up_proj.weight"] = normal(sizes.intermediate, sizes.hidden)
            weights[f"{mlp}down_proj.weight"] = normal(sizes.hidden, sizes.intermediate)
    weights["model.norm.weight"] = ones(sizes.hidden)
    weights["lm_head.weight"] = normal(sizes.vocab, sizes.hidden)
    return weights


def write_folder(folder: Path, sizes: ModelSizes, headers: Mapping[str, TensorHeader]) -> None:
    """A model's folder whose weights are a hole: names and shapes, and no byte on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(sizes)))
    entries: dict[str, object] = {}
    end = 0
    for name, header in headers.items():
        num_bytes = 2
        for length in header.shape:
            num_bytes *= length
        entries[name] = {
            "dtype": header.dtype,
            "shape": list(header.shape),
            "data_offsets": [end, end + num_bytes],
        }
        end += num_bytes
    head = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)


def in_order(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """As an engine exports them."""
    yield from weights.items()
