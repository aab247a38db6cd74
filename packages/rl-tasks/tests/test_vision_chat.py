"""Prompts with images, by a real Hugging Face processor of Qwen3-VL with a tiny vocabulary."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from rl_tasks import ChatMessage, Problem, TaskError, encode_problems
from rl_tasks.vision_chat import encode_image_problems

SPECIAL = ("<pad>", "<end>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
OPEN, CLOSE, IMAGE = 2, 3, 4
WORDS = ("what", "and", "?", "<|user|>", "<|assistant|>")
WHAT, AND, ASK, USER, ANSWER = range(6, 11)
PATCH = 8
TEMPLATE = (
    "{% for m in messages %}<|user|> {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} <|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def processor() -> Any:  # noqa: ANN401
    pad, *_ = words = [*SPECIAL, *WORDS]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=pad)
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    size = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (16 * PATCH) ** 2}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=PATCH, size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3
        ),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=pad, chat_template=TEMPLATE
        ),
        video_processor=Qwen3VLVideoProcessor(patch_size=PATCH),
        chat_template=TEMPLATE,
    )


def picture(width: int, height: int, colour: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, format="PNG")
    return file.getvalue()


def problem(text: str, *images: bytes) -> Problem:
    return Problem(
        problem_id="data.parquet#3",
        messages=(ChatMessage(role="user", content=text),),
        images=images,
        ground_truth="3",
        data_source="shapes",
    )


def encode(processor: Any, *problems: Problem, **changes: Any) -> Any:  # noqa: ANN401
    options: dict[str, Any] = {"max_prompt_tokens": 64, "overlong": "error"}
    return encode_image_problems(processor, problems, **(options | changes))


# 32 x 16 pixels: 4 x 2 patches, 2 placeholders; 16 x 16: one
WIDE, SMALL = picture(32, 16, (255, 255, 255)), picture(16, 16, (0, 0, 0))


def test_ids_hold_every_placeholder_and_say_where(processor: Any) -> None:  # noqa: ANN401
    """By hand: the text around two images, their places, grids, and normalised pixels."""
    given = problem("what <image> and <image> ?", WIDE, SMALL)
    (encoded,) = encode(processor, given).problems
    wide = [OPEN, IMAGE, IMAGE, CLOSE]
    assert list(encoded.prompt_ids) == [
        *(USER, WHAT),
        *wide,
        AND,
        *(OPEN, IMAGE, CLOSE),
        *(ASK, ANSWER),
    ]
    shown, patches = encoded.load_images()
    assert [(each.first_token, each.num_tokens) for each in shown] == [(3, 2), (8, 1)]
    assert [(each.first_token, each.num_tokens) for each in patches] == [(3, 2), (8, 1)]
    assert [each.grid for each in patches] == [(1, 2, 4), (1, 2, 2)]
    assert [each.rgb.shape for each in shown] == [(16, 32, 3), (16, 16, 3)]
    assert shown[0].rgb.min() == 255
    # white is 1 and black -1 with this mean and deviation; 3 colours, 2 frames, 8 x 8 pixels
    assert np.array_equal(patches[0].patches, np.ones((8, 384), dtype=np.float32))
    assert np.array_equal(patches[1].patches, -np.ones((4, 384), dtype=np.float32))
    again = encoded.load_images()
    assert np.array_equal(again.patches[1].patches, patches[1].patches)


def test_neighbouring_images_are_told_apart(processor: Any) -> None:  # noqa: ANN401
    """One after the other, the larger last."""
    (encoded,) = encode(processor, problem("<image><image>", SMALL, WIDE)).problems
    shown, _ = encoded.load_images()
    assert [(each.first_token, each.num_tokens) for each in shown] == [(2, 1), (5, 2)]


def test_text_alone_is_encoded_as_ever(processor: Any) -> None:  # noqa: ANN401
    """Beside prompts with images, and with nothing to load."""
    plain = problem("what <image> ?")
    (encoded,) = encode(processor, plain).problems
    (same,) = encode_problems(
        processor.tokenizer, [plain], max_prompt_tokens=64, overlong="error"
    ).problems
    assert encoded == same
    assert encoded.load_images() == ((), ())


def test_lengths_count_the_placeholders(processor: Any) -> None:  # noqa: ANN401
    """Six tokens with the image's one; dropped, counted, or refused by name."""
    fits, long = problem("<image>", SMALL), problem("<image>", WIDE)
    found = encode(processor, fits, long, max_prompt_tokens=5, overlong="drop")
    assert ([len(each.prompt_ids) for each in found.problems], found.num_overlong) == ([5], 1)
    with pytest.raises(
        TaskError, match=r"problem data.parquet#3: its prompt has 6 tokens, the lim"
    ):
        encode(processor, long, max_prompt_tokens=5)


def test_prompts_that_cannot_be_shown_are_named(processor: Any) -> None:  # noqa: ANN401
    """Text that is a placeholder itself, an image that is too thin, a tokenizer alone."""
    with pytest.raises(TaskError, match=r"#3: the text of message 0 .* holds '<\|image_pad\|>'"):
        encode(processor, problem("<image> <|image_pad|>", SMALL))
    with pytest.raises(TaskError, match=r"#3: the processor refuses it: .*aspect ratio"):
        encode(processor, problem("<image>", picture(300, 1, (0, 0, 0))))
    with pytest.raises(TaskError, match="#3 shows 1 images, which a tokenizer cannot encode"):
        encode_problems(
            processor.tokenizer,
            [problem("<image>", SMALL)],
            max_prompt_tokens=9,
            overlong="error",
        )
