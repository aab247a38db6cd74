"""Prompts with images to token ids and pixels, with a model's own Hugging Face processor.

The processor writes as many placeholders of an image as its pixels come to; the ids that are
returned hold all of them, and each image says where its own stand. Pixels are large (an image of
512 x 512 comes to 6 MB), so they are made when a prompt is sampled, and not for a whole data set.
Needs the extra ``rl-tasks[images]``; the processor brings its own needs.
"""

import functools
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rl_contracts.images import ImagePatches, PromptImage
from rl_tasks.chat import (
    EncodedProblem,
    EncodedProblems,
    LoadedImages,
    Tokenizer,
    encode_prompt,
    kept_problems,
)
from rl_tasks.errors import TaskError
from rl_tasks.pictures import PLACEHOLDER, decode_picture
from rl_tasks.problem import Problem
from rl_tasks.special_tokens import refuse_special_tokens

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class ImageProcessor(Protocol):
    """The part of a Hugging Face image processor that is used here."""

    merge_size: int

    def __call__(self, images: list[Any], *, return_tensors: str) -> Mapping[str, Any]:
        """``pixel_values`` and ``image_grid_thw`` of images of PIL."""


class Processor(Protocol):
    """The part of a Hugging Face processor of a Qwen-VL model that is used here."""

    image_token_id: int
    image_processor: ImageProcessor
    tokenizer: Tokenizer

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:  # noqa: ANN401 - transformers'
        """The text of a chat, whose images are content of the type ``image``."""

    def __call__(
        self,
        images: list[Any] | None = None,
        text: list[str] | None = None,
        **options: Any,  # noqa: ANN401 - transformers'
    ) -> Mapping[str, Any]:
        """``input_ids`` with every placeholder, ``pixel_values`` and ``image_grid_thw``."""


def encode_image_problems(
    processor: Processor,
    problems: Sequence[Problem],
    *,
    max_prompt_tokens: int,
    overlong: Literal["error", "drop"],
) -> EncodedProblems:
    """As `encode_problems`, for prompts that show images and those that do not.

    Args:
        processor: of the model's folder (transformers' ``AutoProcessor``).
        problems: what to encode.
        max_prompt_tokens: longest prompt, in tokens, the placeholders of images included.
        overlong: ``error`` refuses a data set with a longer prompt; ``drop`` leaves such problems
            out and counts them.

    Raises:
        TaskError: for a prompt over the limit, if that is an error, one that holds a special token,
            or one that the processor cannot encode; names the problem.
        NothingLeftError: if no problem is left.
        ImportError: without pillow; names the extra.
    """
    encoded = (
        _encode(processor, problem)
        if problem.images
        else EncodedProblem(
            problem=problem,
            prompt_ids=encode_prompt(
                processor.tokenizer, problem.messages, name=f"problem {problem.problem_id}"
            ),
        )
        for problem in problems
    )
    return kept_problems(encoded, max_prompt_tokens=max_prompt_tokens, overlong=overlong)


def _encode(processor: Processor, problem: Problem) -> EncodedProblem:
    name = f"problem {problem.problem_id}"
    refuse_special_tokens(processor.tokenizer, problem.messages, where=name)
    conversation: list[dict[str, Any]] = [
        {"role": message.role, "content": _content(message.content)} for message in problem.messages
    ]
    text = processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    try:
        given = processor(images=_pictures(problem), text=[text], return_tensors="pt")
    except ValueError as error:  # an image that it does not take, such as one 1 x 1000 pixels large
        raise _error(problem, f"the processor refuses it: {error}") from error
    ids: tuple[int, ...] = tuple(given["input_ids"][0].tolist())
    grids = _grids(given)
    places = _places(processor, problem, ids, grids)
    return EncodedProblem(
        problem=problem,
        prompt_ids=ids,
        load_images=functools.partial(load_images, processor, problem, places),
    )


def load_images(
    processor: Processor, problem: Problem, places: Sequence[tuple[int, int]]
) -> LoadedImages:
    """The images of a problem, decoded and cut into patches.

    Args:
        processor: that encoded the prompt.
        problem: whose images.
        places: first placeholder and number of placeholders of each, in the prompt's token ids.

    Raises:
        TaskError: if they come to other placeholders than those in the prompt.
    """
    arrays = [decode_picture(data) for data in problem.images]
    given = processor.image_processor(images=_pictures(problem), return_tensors="pt")
    grids = _grids(given)
    counts = [prod(grid) // processor.image_processor.merge_size**2 for grid in grids]
    if counts != [length for _, length in places]:
        raise _error(problem, f"its images come to {counts} placeholders, encoded were {places}")
    whole: npt.NDArray[np.float32] = given["pixel_values"].float().numpy()
    shown, patches, begin = [], [], 0
    for rgb, grid, (first, length) in zip(arrays, grids, places, strict=True):
        end = begin + prod(grid)
        shown.append(PromptImage(rgb=rgb, first_token=first, num_tokens=length))
        patches.append(
            ImagePatches(patches=whole[begin:end], grid=grid, first_token=first, num_tokens=length)
        )
        begin = end
    return LoadedImages(shown=tuple(shown), patches=tuple(patches))


def _content(text: str) -> list[dict[str, str]]:
    """A message's text, cut at its images."""
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(PLACEHOLDER)):
        if number:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _pictures(problem: Problem) -> list[Any]:
    from PIL import Image  # noqa: PLC0415 - an extra

    return [Image.fromarray(decode_picture(data)) for data in problem.images]


def _grids(given: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    return [(t, h, w) for t, h, w in given["image_grid_thw"].tolist()]


def _places(
    processor: Processor,
    problem: Problem,
    ids: Sequence[int],
    grids: Sequence[tuple[int, int, int]],
) -> list[tuple[int, int]]:
    """First placeholder and number of placeholders of each image."""
    token = processor.image_token_id
    places: list[tuple[int, int]] = []
    begin = 0
    for grid in grids:
        length = prod(grid) // processor.image_processor.merge_size**2
        while begin < len(ids) and ids[begin] != token:
            begin += 1
        if list(ids[begin : begin + length]) != [token] * length:
            break
        places.append((begin, length))
        begin += length
    if len(places) != len(problem.images) or token in ids[begin:]:
        raise _error(
            problem,
            f"the processor wrote {list(ids).count(token)} placeholders for "
            f"{len(problem.images)} images that come to {list(grids)} patches",
        )
    return places


def _error(problem: Problem, reason: str) -> TaskError:
    return TaskError(f"problem {problem.problem_id}: {reason}")
