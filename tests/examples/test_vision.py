"""Problems with pictures on their way through an example: made, encoded, sampled, packed."""

import asyncio
import io
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import Qwen3Config

from rl_contracts import Completion, PolicyVersion, SamplingParams
from rl_contracts.images import PromptImage
from rl_contracts.packing import pack
from rl_tasks import LoadedImages, RewardResult
from rl_tasks.vision_chat import encode_image_problems
from rollout_vllm.weight_source import WeightSource

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from graders import Answers
from grpo import Task, sample_group
from identity import digest
from prompts import check_images, image_encoder
from tiny_models import character_tokenizer
from tiny_vision import COLOURS, letter_processor, square_problems
from vision import SQUARE_PROMPT, ColouredSquares


def test_pictures_show_what_is_asked() -> None:
    """One square of the colour that the answer names, and no other colour of the list."""
    made = square_problems(30, seed=3)
    assert {problem.ground_truth for problem in made} == set(COLOURS)
    for problem in made:
        pixels = np.asarray(Image.open(io.BytesIO(problem.images[0]))).reshape(-1, 3).tolist()
        shown = {name for name, colour in COLOURS.items() if list(colour) in pixels}
        assert shown == {problem.ground_truth}
        assert 64 <= pixels.count(list(COLOURS[problem.ground_truth])) <= 144
    assert square_problems(30, seed=3) == made


def test_held_out_pictures_are_others() -> None:
    """None of them is trained on."""
    problems = ColouredSquares(num_train=50, num_heldout=10).problems()
    assert (len(problems.train), len(problems.heldout)) == (50, 10)
    assert not {p.images for p in problems.train} & {p.images for p in problems.heldout}


class Showing:
    """A sampler that remembers what it was shown."""

    policy_version = PolicyVersion(0)

    def __init__(self) -> None:
        self.shown: list[tuple[PromptImage, ...]] = []

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        num_samples: int,
        params: SamplingParams,
        images: Sequence[PromptImage] = (),
    ) -> list[Completion]:
        self.shown.append(tuple(images))
        assert prompt_ids
        assert params.max_new_tokens == 2
        drawn = Completion(
            token_ids=(7, 8),
            rollout_logprobs=(-1.0, -1.0),
            policy_versions=(PolicyVersion(0),) * 2,
            finish_reason="length",
        )
        return [drawn] * num_samples

    async def load_from(self, source: WeightSource) -> None:
        raise NotImplementedError(source)


def test_a_group_processes_its_pictures_once() -> None:
    """Three completions share one set of patches, which a micro-batch holds once."""
    processor = letter_processor()
    given = square_problems(1, seed=0)
    encoded = encode_image_problems(
        processor, given, max_prompt_tokens=SQUARE_PROMPT, overlong="error"
    ).problems[0]
    loads: list[int] = []

    def load() -> LoadedImages:
        loads.append(1)
        return encoded.load_images()

    async def grade(answers: Answers) -> list[RewardResult]:
        assert answers.texts
        return [RewardResult(value=1.0, reason="right")] * 3

    problem = replace(encoded, load_images=load)
    task = Task(
        train=[problem],
        heldout=[],
        rewards={},
        tokenizer=processor.tokenizer,
        grade=grade,
    )
    sampler = Showing()
    group = asyncio.run(
        sample_group(
            task,
            sampler,
            problem,
            SamplingParams(max_new_tokens=2),
            num_samples=3,
            group_id="g",
        )
    )
    assert loads == [1]
    ((picture,),) = sampler.shown
    assert (picture.first_token, picture.num_tokens) == (1, 4)
    rows = group.trajectories()
    assert all(row.images[0] is rows[0].images[0] for row in rows)
    [[batch]] = pack(rows, [0.0] * 3, max_tokens=99)
    assert batch.images is not None
    assert batch.images.grids.tolist() == [[1, 4, 4]]
    assert batch.images.image_of_place.tolist() == [0, 0, 0]
    assert batch.images.patches.shape == (16, 3 * 2 * 4 * 4)


def test_other_pictures_are_other_problems() -> None:
    """A run does not go on with them, though names and token ids are the same."""
    processor = letter_processor()
    one, two = square_problems(2, seed=0)
    renamed = replace(two, problem_id=one.problem_id)
    found = [
        digest(
            encode_image_problems(
                processor, [each], max_prompt_tokens=SQUARE_PROMPT, overlong="error"
            ).problems
        )
        for each in (one, renamed, one)
    ]
    assert found[0] == found[2] != found[1]


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    """More images than the sampler takes, and a model without an image processor."""
    problems = square_problems(2, seed=0)
    check_images(problems, most=1)
    with pytest.raises(ValueError, match=r"square-0-0 shows 1 images, and sampler.images_per_prom"):
        check_images(problems, most=0)
    character_tokenizer().save_pretrained(tmp_path)
    Qwen3Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the folder holds no image processor"):
        image_encoder(tmp_path)
