"""Models small enough for a laptop: a Qwen3 and a Qwen3-MoE that half know how to sort digits.

Some hundred thousand parameters, one token per character; the mixture has 8 experts of which 2
work on a token. A short supervised warm-up on demonstrations most of which are shuffled gives them
a policy that is right sometimes: something for reinforcement learning to find.
"""

import functools
import hashlib
import random
from pathlib import Path
from typing import Literal

import tiny_vision
import torch
from model_cache import cache_root, made_once
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rl_tasks import ChatMessage, Problem

Architecture = Literal["qwen3", "qwen3_moe", "qwen3_vl_moe"]
"""`model_type` of the models."""

CHARACTERS = " 0123456789=orst"
PAD, END = "<pad>", "<end>"
MAX_DIGITS = 5
WARM_UP_STEPS = 300
WARM_UP_ROWS = 64
WRONG_SHARE = 0.6
LEARNING_RATE = 3e-3


def sorting_problems(count: int, *, seed: int) -> tuple[Problem, ...]:
    """Distinct problems such as "sort 5283=" with the answer "2358"."""
    generator = random.Random(seed)  # noqa: S311  # nothing secret
    texts: dict[str, None] = {}
    while len(texts) < count:
        digits = generator.randint(3, MAX_DIGITS)
        texts["".join(generator.choices("0123456789", k=digits))] = None
    return tuple(
        Problem(
            problem_id=f"sort-{text}",
            messages=(ChatMessage(role="user", content=f"sort {text}="),),
            ground_truth="".join(sorted(text)),
            data_source="sort",
        )
        for text in texts
    )


def model_folder(architecture: Architecture) -> Path:
    """Where a model is kept. The name changes with what makes it, so that no stale one is used."""
    source = tiny_vision.__file__ if architecture == "qwen3_vl_moe" else __file__
    version = hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12]
    return cache_root() / f"tiny-{architecture.replace('_', '-')}-{version}"


def tiny_model(architecture: Architecture) -> Path:
    """A model as a Hugging Face folder; made first if it is not there yet."""
    return made_once(model_folder(architecture), functools.partial(make, architecture=architecture))


def make(folder: Path, *, architecture: Architecture) -> None:
    """Write model and tokenizer into an existing folder."""
    if architecture == "qwen3_vl_moe":
        tiny_vision.make(folder)
        return
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    warmed_up(untrained(architecture, tokenizer), tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; a chat is its messages, one after the other."""
    words = [PAD, END, *CHARACTERS]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=PAD)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
        clean_up_tokenization_spaces=False,
    )


def untrained(
    architecture: Architecture, tokenizer: PreTrainedTokenizerFast
) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """A model of two layers with random weights."""
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if architecture == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config.from_dict(settings))
    experts = {
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig.from_dict(settings | experts))


def warmed_up(
    model: Qwen3ForCausalLM | Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """The model trained on demonstrations, some of them wrong."""
    pad = tokenizer.pad_token_id
    generator = random.Random(0)  # noqa: S311  # nothing secret
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for _ in range(WARM_UP_STEPS):
        rows = [demonstration(tokenizer, generator) for _ in range(WARM_UP_ROWS)]
        width = max(len(row) for row, _ in rows)
        ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
        labels = torch.tensor(
            [[-100] * prompt + row[prompt:] + [-100] * (width - len(row)) for row, prompt in rows]
        )
        loss = model(input_ids=ids, attention_mask=(ids != pad).long(), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def demonstration(
    tokenizer: PreTrainedTokenizerFast, generator: random.Random
) -> tuple[list[int], int]:
    """Token ids of a problem with an answer, and how many of them are the problem."""
    digits = generator.choices("0123456789", k=generator.randint(3, MAX_DIGITS))
    answer = sorted(digits)
    if generator.random() < WRONG_SHARE:
        generator.shuffle(answer)
    prompt = tokenizer.encode(f"sort {''.join(digits)}=")
    return [*prompt, *tokenizer.encode("".join(answer)), tokenizer.eos_token_id], len(prompt)


if __name__ == "__main__":
    print(tiny_model("qwen3"), tiny_model("qwen3_moe"), sep="\n")
