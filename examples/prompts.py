"""Problems to token ids: with a model's tokenizer, or with its processor where they show images."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import transformers

from rl_tasks import EncodedProblems, Problem, Tokenizer, encode_problems
from rl_tasks.vision_chat import Processor, encode_image_problems


class Encoder(Protocol):
    """Encodes problems for one model."""

    def __call__(
        self,
        problems: Sequence[Problem],
        *,
        max_prompt_tokens: int,
        overlong: Literal["error", "drop"],
    ) -> EncodedProblems:
        """See `rl_tasks.encode_problems`."""


def text_encoder(model: Path) -> tuple[Tokenizer, Encoder]:
    """The tokenizer of a model's folder, and what encodes problems with it."""
    tokenizer: Tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return tokenizer, functools.partial(encode_problems, tokenizer)


def image_encoder(model: Path) -> tuple[Tokenizer, Encoder]:
    """The same, for problems that show images.

    Raises:
        ValueError: for a folder without a processor.
    """
    processor: Processor = transformers.AutoProcessor.from_pretrained(model)
    if not hasattr(processor, "image_processor"):
        message = (
            f"{model}: the problems show images, and the folder holds no image processor "
            "(preprocessor_config.json, processor_config.json); choose a model that sees"
        )
        raise ValueError(message)
    return processor.tokenizer, functools.partial(encode_image_problems, processor)


def check_images(problems: Sequence[Problem], *, most: int) -> None:
    """Refuse a problem that shows more images than the sampler takes.

    Raises:
        ValueError: names it, and the setting.
    """
    for problem in problems:
        if len(problem.images) > most:
            message = (
                f"problem {problem.problem_id} shows {len(problem.images)} images, and "
                f"sampler.images_per_prompt = {most}; raise it"
            )
            raise ValueError(message)
