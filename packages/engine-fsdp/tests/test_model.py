"""What loading refuses, and what it leaves as it was."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from engine_fsdp.model import load_model, pack_rows

SaveModel = Callable[..., Path]


def _change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_missing_weight_is_an_error(save_model: SaveModel) -> None:
    """transformers would fill it with random numbers and warn (VeOmni#67's kind)."""
    folder = save_model()
    name = "model.layers.1.mlp.up_proj.weight"
    _change_weights(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"leave some of it random.*missing_keys.*{name}"):
        load_model(folder, temperature=1.0)


def test_a_weight_left_over_is_an_error(save_model: SaveModel) -> None:
    """A tensor that the model has no place for means that it is another model's."""
    folder = save_model()
    _change_weights(folder, lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"unexpected_keys.*model\.extra\.weight"):
        load_model(folder, temperature=1.0)


def test_a_weight_of_another_shape_is_an_error(save_model: SaveModel) -> None:
    """The report has both shapes."""
    folder = save_model()
    _change_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"mismatched_keys.*model\.norm\.weight.*\[2\].*\[32\]"):
        load_model(folder, temperature=1.0)


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    """Nothing to load: the message says what was expected where."""
    with pytest.raises(FileNotFoundError, match=r"config\.json and \*\.safetensors"):
        load_model(tmp_path, temperature=1.0)


def test_tied_embeddings_stay_one_tensor(save_model: SaveModel) -> None:
    """Head and embedding share their storage after loading; an untied head has its own (A48)."""
    tied = load_model(save_model("qwen3"), temperature=1.0).model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    untied = load_model(save_model("llama", tie_word_embeddings=False), temperature=1.0).model
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_a_head_that_differs_from_its_tied_embedding_is_refused(save_model: SaveModel) -> None:
    """A config that says tied beside two weights would be trained as one and saved as other."""
    folder = save_model("qwen3")
    _change_weights(
        folder,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1e-3}
        ),
    )
    with pytest.raises(
        ValueError,
        match=r"tie_word_embeddings true, but the head and the embedding of Qwen3ForCausalLM differ"
        r".* set tie_word_embeddings to false in config\.json .* or take its weight \(lm_head",
    ):
        load_model(folder, temperature=1.0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    untied = load_model(folder, temperature=1.0).model
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_a_head_that_equals_its_tied_embedding_is_one_tensor_with_it(
    save_model: SaveModel,
) -> None:
    """Some folders hold the tied weight twice: it is loaded, and kept, once (A48)."""
    folder = save_model("qwen3")
    _change_weights(
        folder,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    packed = load_model(folder, temperature=1.0)
    assert packed.model.lm_head.weight is packed.model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(packed.named_weights())


def test_windowed_layers_are_refused(save_model: SaveModel) -> None:
    """A model with sliding-window layers is refused by name, not trained with full attention."""
    folder = save_model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(ValueError, match=r"layers of type sliding_attention"):
        load_model(folder, temperature=1.0)


def test_a_head_that_does_more_is_found(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose own forward scales its logits differs from the packed head and is refused."""
    folder = save_model("llama")
    plain = LlamaForCausalLM.forward

    def scaled(self: LlamaForCausalLM, **inputs: object) -> object:
        output = plain(self, **inputs)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM differ by up to .* nats"):
        load_model(folder, temperature=1.0)


def test_weights_are_float32_and_dropout_is_off(save_model: SaveModel) -> None:
    """Master weights are float32 for a bfloat16 folder, and dropout in the config has no effect."""
    folder = save_model("qwen3", dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    model = load_model(folder, temperature=1.0)
    assert {weight.dtype for _, weight in model.named_weights()} == {torch.float32}
    rows = [torch.arange(9)]
    assert torch.equal(model(*pack_rows(rows)).logprobs, model(*pack_rows(rows)).logprobs)


def test_checkpointing_changes_no_gradient(save_model: SaveModel) -> None:
    """Recomputed activations give the gradient of kept ones, bit for bit, and blocks run twice."""
    folder = save_model()
    rows = [torch.arange(9), torch.arange(4)]
    gradients, calls = [], []
    for checkpointing in ("none", "full"):
        model = load_model(folder, temperature=1.0)
        model.wrap_blocks(checkpointing=checkpointing, compiled=False)
        arguments = pack_rows(rows)
        model(*arguments).logprobs.sum().backward()
        gradients.append({name: weight.grad for name, weight in model.named_weights()})
        calls.append(arguments[4].num_calls)
    assert calls == [2, 4]
    for name, gradient in gradients[0].items():
        again = gradients[1][name]
        assert gradient is not None
        assert again is not None
        assert torch.equal(gradient, again)
