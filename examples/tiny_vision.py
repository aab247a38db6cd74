"""A model that sees, small enough for a laptop: a Qwen3-VL-MoE that half knows its colours.

Each picture is a square of one colour somewhere on grey noise, and the answer is the colour's name,
one token per letter. A short supervised warm-up on demonstrations, most of which name any colour,
gives the model a policy that is right sometimes: something for reinforcement learning to find.
Language model, vision tower and the folder's layout are those of Qwen3-VL-30B-A3B, made small.
"""

import io
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from rl_tasks import ChatMessage, Problem

COLOURS: Final = {
    "red": (220, 30, 30),
    "green": (30, 180, 40),
    "blue": (40, 60, 230),
    "white": (250, 250, 250),
}
PAD, END, IMAGE = "<pad>", "<end>", "<|image_pad|>"
SPECIAL: Final = (PAD, END, "<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz ?"
QUESTION: Final = "colour?"
PATCH, MERGE, SIDE = 4, 2, 16
"""Pixels of a patch, patches of a placeholder, and pixels of a picture, along one side."""

WARM_UP_STEPS = 300
WARM_UP_ROWS = 32
WARM_UP_PICTURES = 256
WRONG_SHARE = 0.6
LEARNING_RATE = 3e-3
TEMPLATE: Final = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def picture(colour: tuple[int, int, int], generator: random.Random) -> Image.Image:
    """A square of a colour, half to three quarters as wide as the picture, on grey noise."""
    noise = np.random.default_rng(generator.getrandbits(32))
    pixels = np.repeat(noise.integers(60, 130, (SIDE, SIDE, 1)), 3, axis=2)
    side = generator.randint(SIDE // 2, 3 * SIDE // 4)
    top, left = generator.randint(0, SIDE - side), generator.randint(0, SIDE - side)
    pixels[top : top + side, left : left + side] = colour
    return Image.fromarray(pixels.astype(np.uint8))


def square_problems(count: int, *, seed: int) -> tuple[Problem, ...]:
    """Problems such as a picture of a red square, "colour?", and the answer "red"."""
    generator = random.Random(seed)  # noqa: S311  # nothing secret
    problems = []
    for number in range(count):
        name = generator.choice(list(COLOURS))
        file = io.BytesIO()
        picture(COLOURS[name], generator).save(file, format="PNG")
        problems.append(
            Problem(
                problem_id=f"square-{seed}-{number}",
                messages=(ChatMessage(role="user", content=f"<image>{QUESTION}"),),
                images=(file.getvalue(),),
                ground_truth=name,
                data_source="squares",
            )
        )
    return tuple(problems)


def make(folder: Path) -> None:
    """Write model and processor into an existing folder."""
    torch.manual_seed(0)
    processor = letter_processor()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its products are so small that threads mostly wait for each other
    try:
        model = warmed_up(untrained(processor.tokenizer), processor)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    save_file(as_published(model), folder / "model.safetensors", metadata={"format": "pt"})


def as_published(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights as Qwen3-VL-MoE is published and as vLLM reads it.

    Stacks of experts are [experts, in, out]; transformers writes its own layout for a model that
    was not loaded from such a folder.
    """
    return {
        name: (weight.transpose(1, 2) if ".experts." in name else weight).detach().contiguous()
        for name, weight in model.named_parameters()
    }


def letter_processor() -> Qwen3VLProcessor:
    """One token per letter; a picture of 16 x 16 pixels has 4 x 4 patches and 4 placeholders."""
    letters = word_level(
        [*SPECIAL, *LETTERS],
        SPECIAL,
        splits=pre_tokenizers.Split(Regex("."), "isolated"),
        template=TEMPLATE,
    )
    return processor_of(letters, patch=PATCH, smallest=SIDE * SIDE // 4, largest=4 * SIDE * SIDE)


def word_level(
    words: Sequence[str],
    special: Iterable[str],
    *,
    splits: pre_tokenizers.PreTokenizer,
    template: str,
) -> PreTrainedTokenizerFast:
    """One token per word, without spaces where they are put together.

    Args:
        words: in the order of their ids, `PAD` and `END` among them.
        special: those that are left out of texts.
        splits: a text into words.
        template: of chats.
    """
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=PAD)
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.pre_tokenizer = splits
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def processor_of(
    tokenizer: PreTrainedTokenizerFast, *, patch: int, smallest: int, largest: int
) -> Qwen3VLProcessor:
    """A processor of pictures with the chat template of this file.

    Args:
        tokenizer: has the words of `SPECIAL`.
        patch: pixels along one side of a patch.
        smallest: pixels that a picture is scaled up to.
        largest: pixels that it is scaled down to.
    """
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=patch,
            merge_size=MERGE,
            size={"shortest_edge": smallest, "longest_edge": largest},
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        ),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(patch_size=patch, merge_size=MERGE),
        chat_template=TEMPLATE,
    )


def untrained(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLMoeForConditionalGeneration:
    """Two layers of each kind with random weights: 8 experts, of which 2 work on a token."""
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    start, end, image, video = (tokenizer.get_vocab()[word] for word in SPECIAL[2:])
    config = Qwen3VLMoeConfig(
        text_config=text,
        vision_config=vision,
        dtype="float32",
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
    return Qwen3VLMoeForConditionalGeneration(config)


def warmed_up(
    model: Qwen3VLMoeForConditionalGeneration, processor: Qwen3VLProcessor
) -> Qwen3VLMoeForConditionalGeneration:
    """The model trained on demonstrations, some of them wrong."""
    tokenizer = processor.tokenizer
    pad = tokenizer.pad_token_id
    generator = random.Random(0)  # noqa: S311  # nothing secret
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    names = list(COLOURS)
    shown = [generator.choice(names) for _ in range(WARM_UP_PICTURES)]
    pictures = [picture(COLOURS[name], generator) for name in shown]
    text = f"{SPECIAL[2]}{IMAGE}{SPECIAL[3]}{QUESTION}"
    # all pictures are as large, so all prompts are as long
    given = processor(text=[text] * len(pictures), images=pictures, return_tensors="pt")
    prompts, kinds, grids = (
        given[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")
    )
    patches = given["pixel_values"].view(len(pictures), -1, given["pixel_values"].shape[1])
    spelt = {name: [*tokenizer.encode(name), tokenizer.eos_token_id] for name in names}
    longest = max(map(len, spelt.values()))
    for _ in range(WARM_UP_STEPS):
        rows = generator.sample(range(len(pictures)), WARM_UP_ROWS)
        said = [
            generator.choice(names) if generator.random() < WRONG_SHARE else shown[row]
            for row in rows
        ]
        answers = torch.tensor(
            [spelt[name] + [pad] * (longest - len(spelt[name])) for name in said]
        )
        ids = torch.cat([prompts[rows], answers], dim=1)
        labels = torch.where(answers == pad, -100, answers)
        loss = model(
            input_ids=ids,
            mm_token_type_ids=torch.cat([kinds[rows], torch.zeros_like(answers)], dim=1),
            attention_mask=(ids != pad).long(),
            pixel_values=patches[rows].flatten(0, 1),
            image_grid_thw=grids[rows],
            labels=torch.cat([torch.full_like(prompts[rows], -100), labels], dim=1),
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
