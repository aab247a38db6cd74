"""Made-up models and problems, and the slices of the recipes that use them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import made_up
from conduct import RunSettings
from made_up import MadeUpModel, MadeUpWords, mean_characters
from plan_model import facts_of
from prompts import image_encoder, text_encoder
from tiny_vision import TEMPLATE, processor_of

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def make(folder: Path, config: dict[str, Any]) -> Path:
    """A made-up model of these sizes."""
    folder.mkdir()
    made_up.make(folder, facts=facts_of(config, name="tiny", where="test"))
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_a_made_up_model_is_one_for_transformers_and_the_same_every_time(tmp_path: Path) -> None:
    """All weights that the plan counts are in the file, and load; matrices are random, norms 1."""
    config = {**TINY, **EXPERTS}
    one, other = make(tmp_path / "one", config), make(tmp_path / "other", config)
    weights = stored(one)
    assert sum(w.numel() for w in weights.values()) == (
        facts_of(config, name="tiny", where="test").counts.total
    )
    assert all(torch.equal(weight, stored(other)[name]) for name, weight in weights.items())
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert torch.equal(weights["model.norm.weight"], torch.ones(32, dtype=torch.bfloat16))
    spread = torch.cat([w.float().view(-1) for w in weights.values() if w.dim() > 1]).std()
    assert spread.item() == pytest.approx(0.02, rel=0.05)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(one)
    assert torch.isfinite(loaded(torch.tensor([[1, 2, 3]])).logits).all()


def test_a_prompt_has_the_tokens_that_it_is_said_to_have(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", TINY)
    _, encode = text_encoder(folder)
    problems = MadeUpWords(max_prompt_tokens=7, max_characters=5, num_train=3).problems()
    rows = encode(problems.train, max_prompt_tokens=7, overlong="error").problems
    assert [len(row.prompt_ids) for row in rows] == [7, 7, 7]
    assert len(transformers.AutoTokenizer.from_pretrained(folder)) == 96


def test_the_length_of_words() -> None:
    """Tokens 0 to 7 are a digit and as many strokes: 8 + (0 + 1 + ... + 7) = 36 characters."""
    assert mean_characters(8) == 36 / 8
    assert made_up.word(0x1F3) == "1f3___"
    assert len({made_up.word(index) for index in range(5000)}) == 5000


def test_the_folder_says_which_model_it_is() -> None:
    model = MadeUpModel(name="qwen3-30b-a3b", num_layers=4)
    assert MadeUpModel.at(model.folder) == model
    assert MadeUpModel.at(model.folder.parent / "slice-qwen3-30b-a3b-4-layers-0") is None
    assert MadeUpModel.at(Path("slice-unknown-4-layers-0")) is None
    assert model.facts.num_hidden_layers == 4
    assert model.facts.hidden_size == 2048
    assert json.loads(json.dumps(model.config))["eos_token_id"] == 151935


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"picture_side": 100}, "expected 0, or a multiple of 32 from 256 on"),
        ({"picture_side": 224}, "expected 0, or a multiple of 32 from 256 on"),
        ({"picture_side": 256, "max_prompt_tokens": 66}, "leaves no word of data.max_prompt_to"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MadeUpWords(**{"max_prompt_tokens": 100, "max_characters": 1, **settings})


def test_a_picture_of_a_slice_has_the_placeholders_that_it_is_said_to_have(tmp_path: Path) -> None:
    """256 pixels are 16 patches, two of which are a placeholder: 8 x 8 of them."""
    facts = MadeUpModel(name="qwen3-vl-30b-a3b-instruct", num_layers=1).facts
    words = made_up.word_tokenizer(facts.vocab_size, made_up.picture_words(facts.config), TEMPLATE)
    processor_of(
        words, patch=16, smallest=made_up.SMALLEST, largest=made_up.LARGEST
    ).save_pretrained(tmp_path)
    facts.write_config(tmp_path)
    _, encode = image_encoder(tmp_path)
    problems = MadeUpWords(
        max_prompt_tokens=70, max_characters=5, num_train=1, picture_side=256
    ).problems()
    (row,) = encode(problems.train, max_prompt_tokens=70, overlong="error").problems
    assert len(row.prompt_ids) == 70
    assert row.prompt_ids.count(151655) == 64


def test_when_there_is_a_checkpoint() -> None:
    every = RunSettings(checkpoint_every=3)
    assert [every.keeps(step, ends=step == 5) for step in (2, 3, 4, 5)] == [
        False,
        True,
        False,
        True,
    ]
    assert not RunSettings(checkpoint_every=None).keeps(3, ends=True)
    with pytest.raises(ValueError, match="checkpoint_every = 0: expected a number of steps of at"):
        RunSettings(checkpoint_every=0)
