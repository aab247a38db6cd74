"""Real vLLM on the CPU with a tiny model that sees: what it reads of a prompt, and its logprobs."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from rl_contracts.images import PromptImage
from rl_contracts.rollout import Completion, PolicyVersion, SamplingParams
from rollout_vllm import GenerationError, RequestOptions, VllmConfig, VllmSampler
from rollout_vllm.vllm_prompts import Prompt

pytestmark = pytest.mark.slow

SPECIAL = ("<pad>", "<end>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
END, OPEN, CLOSE, IMAGE, VIDEO = 1, 2, 3, 4, 5
VOCAB_SIZE = 48
PATCH = 8
PARAMS = SamplingParams(max_new_tokens=4, seed=11)
# nats; two programs that add up in different orders, in float32
TOLERANCE = 2e-4

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,  # which vLLM asks for, and all others take for granted
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": END,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": PATCH,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def processor() -> Qwen3VLProcessor:
    pad, end, *_ = words = [
        *SPECIAL,
        *(f"w{number}" for number in range(VOCAB_SIZE - len(SPECIAL))),
    ]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=pad))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    size = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (16 * PATCH) ** 2}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=PATCH, size=size),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=end),
        video_processor=Qwen3VLVideoProcessor(patch_size=PATCH),
    )


def make_model(seed: int) -> Qwen3VLMoeForConditionalGeneration:
    torch.manual_seed(seed)
    config = Qwen3VLMoeConfig(
        text_config=TEXT,
        vision_config=VISION,
        dtype="float32",
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=OPEN,
        vision_end_token_id=CLOSE,
    )
    model = Qwen3VLMoeForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.eval()
    return model


def published(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight as published files hold it: stacks of experts are `[experts, in, out]` there."""
    return weight.transpose(1, 2).contiguous() if ".experts." in name else weight


def save(model: Qwen3VLMoeForConditionalGeneration, folder: Path) -> None:
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    gate_up = (TEXT["num_experts"], 2 * TEXT["moe_intermediate_size"], TEXT["hidden_size"])
    stack = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    if weights[stack].shape == gate_up:  # transformers writes its own layout for a new model
        weights = {name: published(name, weight) for name, weight in weights.items()}
    save_file(weights, file, metadata={"format": "pt"})


def picture(seed: int, height: int, width: int) -> "npt.NDArray[np.uint8]":
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (height, width, 3), dtype=np.uint8)


def plain_logprobs(
    model: Qwen3VLMoeForConditionalGeneration,
    prompt: Prompt,
    completion: Completion,
) -> torch.Tensor:
    """Logprobs of the sampled tokens by transformers, from its own processing of the images."""
    given = processor().image_processor(
        images=[np.array(image.rgb) for image in prompt.images], return_tensors="pt"
    )
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            pixel_values=given["pixel_values"],
            image_grid_thw=given["image_grid_thw"],
            mm_token_type_ids=(ids == IMAGE).int(),
        ).logits[0]
    picked = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    found: torch.Tensor = picked[len(prompt.token_ids) - 1 :]
    return found


def worst(
    model: Qwen3VLMoeForConditionalGeneration, prompt: Prompt, completions: Sequence[Completion]
) -> float:
    """Largest difference in nats, over the completions that plain transformers can read.

    It takes a placeholder that the policy drew for one more image, and refuses.
    """
    read = [each for each in completions if not {IMAGE, VIDEO} & set(each.token_ids)]
    assert len(read) >= len(completions) // 2
    return max(
        (plain_logprobs(model, prompt, each) - torch.tensor(each.rollout_logprobs))
        .abs()
        .max()
        .item()
        for each in read
    )


# 24 x 40 pixels come to 4 x 4 patches (halves are rounded to even), 16 x 16 to 2 x 2
TWO = Prompt(
    [9, OPEN, IMAGE, IMAGE, IMAGE, IMAGE, CLOSE, 10, OPEN, IMAGE, CLOSE, 11],
    [
        PromptImage(rgb=picture(0, 24, 40), first_token=2, num_tokens=4),
        PromptImage(rgb=picture(1, 16, 16), first_token=9, num_tokens=1),
    ],
)


def test_what_vllm_is_given_and_read() -> None:
    """One placeholder an image goes in; a prompt that was read otherwise is an error by name."""
    assert TWO.short_ids() == [9, OPEN, IMAGE, CLOSE, 10, OPEN, IMAGE, CLOSE, 11]
    assert [np.asarray(each).tolist() for each in TWO.pictures()] == [
        each.rgb.tolist() for each in TWO.images
    ]
    read = list(TWO.token_ids)
    TWO.check_read(read)
    with pytest.raises(
        GenerationError,
        match=r"read a prompt of 13 tokens where 12 .* from token 6 on \(\[3, 10, 2\] meant, \[4,",
    ):
        TWO.check_read([*read[:6], IMAGE, *read[6:]])
    with pytest.raises(GenerationError, match="a prompt of 0 tokens where 12 were meant"):
        TWO.check_read(None)
    Prompt([5, 6], []).check_read(None)


async def draw(sampler: VllmSampler, prompt: Prompt, count: int = 6) -> list[Completion]:
    return await sampler.sample(
        prompt.token_ids, num_samples=count, params=PARAMS, images=prompt.images
    )


async def check(folder: Path) -> None:
    model = make_model(0)
    await asyncio.to_thread(save, model, folder)
    config = VllmConfig(
        model=str(folder),
        max_model_len=64,
        dtype="float32",
        kv_cache_gib=0.25,
        cpu_threads=1,
        images_per_prompt=2,
    )
    async with await VllmSampler.start(config, policy_version=PolicyVersion(0)) as sampler:
        drawn = await draw(sampler, TWO)
        assert worst(model, TWO, drawn) < TOLERANCE
        # the same token ids with another picture: no cache of the first one's is used
        other = Prompt(
            TWO.token_ids,
            [PromptImage(rgb=picture(7, 24, 40), first_token=2, num_tokens=4), TWO.images[1]],
        )
        assert worst(model, other, await draw(sampler, other)) < TOLERANCE
        swapped = plain_logprobs(model, other, drawn[0]) - plain_logprobs(model, TWO, drawn[0])
        assert swapped.abs().max() > 100 * TOLERANCE  # so the picture matters
        text = Prompt([9, 10, 11], [])
        alone = await draw(sampler, text, count=1)
        assert alone[0].token_ids

        deltas = sampler.stream(TWO.token_ids, params=PARAMS, images=TWO.images)
        streamed = [delta async for delta in deltas]
        tokens = tuple(token for delta in streamed for token in delta.token_ids)
        assert tokens == drawn[0].token_ids

        # two placeholders for what vLLM cuts into four
        wrong = Prompt(
            [9, OPEN, IMAGE, IMAGE, CLOSE],
            [PromptImage(rgb=picture(0, 24, 40), first_token=2, num_tokens=2)],
        )
        with pytest.raises(GenerationError, match="read a prompt of 7 tokens where 5 were meant"):
            await draw(sampler, wrong)
        three = Prompt(TWO.token_ids, [*TWO.images, TWO.images[1]])
        with pytest.raises(ValueError, match="at most 2 images"):
            await draw(sampler, three)

        # weights under the published names, the vision tower's too; caches of images are dropped
        newer = make_model(1)
        weights = [(name, published(name, w.detach())) for name, w in newer.named_parameters()]
        await sampler.load_weights(weights, version=PolicyVersion(1))
        again = await draw(sampler, TWO)
        assert worst(newer, TWO, again) < TOLERANCE
        assert {version for each in again for version in each.policy_versions} == {1}

        # interrupted by an update, and gone on from its prefix with its images
        long = SamplingParams(max_new_tokens=40, seed=3)
        options = RequestOptions(min_new_tokens=40)
        drawing = asyncio.ensure_future(
            sampler.sample(
                TWO.token_ids, num_samples=2, params=long, options=options, images=TWO.images
            )
        )
        await asyncio.sleep(0.2)
        await sampler.load_weights(weights, version=PolicyVersion(2), in_flight="abort")
        for completion in await drawing:
            assert len(completion.token_ids) == 40


def test_a_sampler_that_sees(tmp_path: Path) -> None:
    """Ids, logprobs, streams, refusals and weight updates of prompts with pictures."""
    asyncio.run(check(tmp_path))
    assert "vision_config" in json.loads((tmp_path / "config.json").read_text())
