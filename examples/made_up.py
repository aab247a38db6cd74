"""Models with the layers of published ones and random weights, and words for them to learn.

What a model of such sizes costs is seen without a download: as many layers as asked for, a
vocabulary of made-up words of different lengths, and a reward that a random policy gets half of the
time, for completions that are short in letters.
"""

import functools
import hashlib
import io
import json
import random
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Final, final

import attrs
import numpy as np
import tiny_vision
import torch
import transformers
from conduct import Problems
from model_cache import cache_root, made_once
from PIL import Image
from plan_model import ModelFacts, facts_of, published_models, read_model
from safetensors.torch import save_file
from tiny_vision import END, PAD, TEMPLATE, as_published, processor_of, word_level
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from rl_tasks import ChatMessage, LengthWithin, Problem

TEXT_TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
STANDARD_DEVIATION: Final = 0.02
"""Of the weights: transformers' `initializer_range` of these models."""

BLOCK: Final = 2**24
"""Weights that one thread makes at a time."""

PICTURE_TOKEN_SIDE: Final = 32
"""Pixels along one side of what a placeholder stands for: patches of 16, two by two."""

SMALLEST, LARGEST = 2**16, 2**24
"""Pixels that pictures are scaled to: preprocessor_config.json of Qwen/Qwen3-VL-30B-A3B-Instruct,
from memory."""


def word(index: int) -> str:
    """What a token says: its number, and up to seven strokes, so that lengths differ."""
    return f"{index:x}" + "_" * (index % 8)


def mean_characters(vocab_size: int) -> float:
    """Characters of a token, on the average over all."""
    return sum(len(word(index)) for index in range(vocab_size)) / vocab_size


@final
@attrs.frozen(kw_only=True)
class MadeUpModel:
    """So many layers of a published model, with random weights."""

    name: str
    """Of the published model; see `plan_model.published_models`."""

    num_layers: int
    """Of the language model."""

    @property
    def folder(self) -> Path:
        """Where it is kept. The name changes with what makes it, so that no stale one is used."""
        makers = (Path(__file__).read_bytes(), Path(tiny_vision.__file__).read_bytes())
        sizes = json.dumps(self.config, sort_keys=True).encode()
        version = hashlib.sha256(b"".join((*makers, sizes))).hexdigest()[:12]
        return cache_root() / f"slice-{self.name}-{self.num_layers}-layers-{version}"

    @classmethod
    def at(cls, folder: Path) -> "MadeUpModel | None":
        """The model whose folder this is; None for any other folder."""
        found = re.fullmatch(r"slice-(.+)-(\d+)-layers-\w+", folder.name)
        if found is None or found[1] not in published_models():
            return None
        model = cls(name=found[1], num_layers=int(found[2]))
        return model if model.folder == folder else None

    @property
    def facts(self) -> ModelFacts:
        """Its sizes; nothing needs to be there."""
        return facts_of(self.config, name=self.folder.name, where=self.name)

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        facts = read_model(self.name)
        config = json.loads(json.dumps(dict(facts.config)))
        text = config.get("text_config", config)
        text["num_hidden_layers"] = self.num_layers
        for part in (config, text):
            part["eos_token_id"] = facts.vocab_size - 1
            part["pad_token_id"] = facts.vocab_size - 2
            part["dtype"] = "bfloat16"
        return dict(config)

    def make(self) -> Path:
        """Its Hugging Face folder; made first if it is not there yet."""
        return made_once(self.folder, functools.partial(make, facts=self.facts))


def make(folder: Path, *, facts: ModelFacts) -> None:
    """Write model and tokenizer into an existing folder."""
    facts.write_config(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    architecture = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        model: transformers.PreTrainedModel = architecture(config)
    nn.Module.to(model, torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    randomise(model)
    special = {facts.vocab_size - 1: END, facts.vocab_size - 2: PAD}
    if facts.vision_weights:
        tokenizer = word_tokenizer(
            facts.vocab_size, special | picture_words(facts.config), TEMPLATE
        )
        config.save_pretrained(folder)
        save_file(as_published(model), folder / "model.safetensors", metadata={"format": "pt"})
        processor_of(tokenizer, patch=16, smallest=SMALLEST, largest=LARGEST).save_pretrained(
            folder
        )
    else:
        model.save_pretrained(folder)
        word_tokenizer(facts.vocab_size, special, TEXT_TEMPLATE).save_pretrained(folder)


def randomise(model: nn.Module) -> None:
    """Random numbers in every matrix, the same every time; ones and zeros in every vector."""
    blocks: list[Tensor] = []
    for name, weight in sorted(model.named_parameters()):
        values = weight.detach().view(-1)
        if weight.dim() > 1:
            blocks += values.split(BLOCK)
        else:
            values.fill_(0.0 if name.endswith("bias") else 1.0)

    def fill(numbered: tuple[int, Tensor]) -> None:
        seed, block = numbered
        block.normal_(0.0, STANDARD_DEVIATION, generator=torch.Generator().manual_seed(seed))

    with ThreadPoolExecutor() as threads:
        list(threads.map(fill, enumerate(blocks)))


def picture_words(config: Mapping[str, Any]) -> dict[int, str]:
    """The tokens around and in the place of a picture."""
    return {
        config["vision_start_token_id"]: "<|vision_start|>",
        config["vision_end_token_id"]: "<|vision_end|>",
        config["image_token_id"]: "<|image_pad|>",
        config["video_token_id"]: "<|video_pad|>",
    }


def word_tokenizer(
    vocab_size: int, special: Mapping[int, str], template: str
) -> PreTrainedTokenizerFast:
    """One token per word."""
    return word_level(
        [special.get(index, word(index)) for index in range(vocab_size)],
        special.values(),
        splits=pre_tokenizers.WhitespaceSplit(),
        template=template,
    )


@final
@attrs.frozen(kw_only=True)
class MadeUpWords:
    """Prompts of made-up words, and a reward for completions that are short in letters."""

    kind: ClassVar[str] = "words"

    max_prompt_tokens: int = attrs.field(validator=attrs.validators.ge(1))
    """Tokens of every prompt, placeholders of the picture included."""

    max_characters: int = attrs.field(validator=attrs.validators.ge(1))
    """Longest completion that is rewarded, in characters."""

    picture_side: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Pixels along one side of the picture in each prompt, a multiple of 32; none: 0."""

    num_train: int = attrs.field(default=1000, validator=attrs.validators.ge(1))
    """Problems to train on."""

    num_heldout: int = attrs.field(default=32, validator=attrs.validators.ge(1))
    """Problems that are never trained on."""

    seed: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Of the problems."""

    def __attrs_post_init__(self) -> None:
        """Refuse a picture that fills the prompt, or is no whole number of placeholders."""
        if self.picture_side % PICTURE_TOKEN_SIDE or 0 < self.picture_side**2 < SMALLEST:
            raise ValueError(
                f"data.picture_side = {self.picture_side}: expected 0, or a multiple of "
                f"{PICTURE_TOKEN_SIDE} from {int(SMALLEST**0.5)} on"
            )
        if self.num_words < 1:
            raise ValueError(
                f"data.picture_side = {self.picture_side} leaves no word of data."
                f"max_prompt_tokens = {self.max_prompt_tokens}; raise it"
            )

    @property
    def num_words(self) -> int:
        """Of a prompt."""
        around = 2 if self.picture_side else 0  # what begins and ends a picture
        return self.max_prompt_tokens - around - (self.picture_side // PICTURE_TOKEN_SIDE) ** 2

    def problems(self) -> Problems:
        """Make them up."""
        made = list(self._make())
        return Problems(
            train=made[self.num_heldout :],
            heldout=made[: self.num_heldout],
            rewards={"words": LengthWithin(max_characters=self.max_characters)},
        )

    def _make(self) -> Iterator[Problem]:
        generator = random.Random(self.seed)  # noqa: S311  # nothing secret
        for number in range(self.num_heldout + self.num_train):
            words = " ".join(word(generator.randrange(10_000)) for _ in range(self.num_words))
            picture = (noise(self.picture_side, generator),) if self.picture_side else ()
            yield Problem(
                problem_id=f"words-{self.seed}-{number}",
                messages=(ChatMessage(role="user", content="<image>" * len(picture) + words),),
                images=picture,
                ground_truth="short",
                data_source="words",
            )


def noise(side: int, generator: random.Random) -> bytes:
    """A picture of coloured noise, coarse enough to be a small file."""
    coarse = np.random.default_rng(generator.getrandbits(32)).integers(0, 256, (8, 8, 3))
    file = io.BytesIO()
    Image.fromarray(coarse.astype(np.uint8)).resize((side, side)).save(file, format="PNG")
    return file.getvalue()
