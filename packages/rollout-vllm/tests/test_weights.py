"""Publishing weights, and checking a publication against a model; no vLLM."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_contracts.rollout import PolicyVersion
from rl_contracts.train import NamedTensor
from rollout_vllm import publish_weights
from rollout_vllm.headers import TensorHeader, read_model_headers
from rollout_vllm.weights_check import check_published

VERSION = PolicyVersion(4)


def test_weights_are_cast_split_and_complete(tmp_path: Path) -> None:
    """Buckets of 32 bytes: five tensors of 16 bytes in bfloat16 make three files."""
    weights = [NamedTensor(f"w{i}", torch.full((2, 4), float(i))) for i in range(5)]
    published = publish_weights(
        weights, version=VERSION, folder=tmp_path, dtype="bfloat16", bucket_bytes=32
    )
    assert [file.name for file in published.files] == [
        "00000.safetensors",
        "00001.safetensors",
        "00002.safetensors",
    ]
    found = {name: tensor for path in published.paths() for name, tensor in load_file(path).items()}
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        f"w{i}": torch.bfloat16 for i in range(5)
    }
    assert all(torch.equal(found[w.name], w.tensor.bfloat16()) for w in weights)
    assert published.num_bytes == sum(path.stat().st_size for path in published.paths())


def test_views_and_aliases_and_integers_arrive(tmp_path: Path) -> None:
    """Transposed, shared and integer tensors keep their values; integers keep their type."""
    base = torch.arange(6.0).reshape(2, 3)
    counts = torch.tensor([1, 2])
    published = publish_weights(
        [("a", base), ("b", base), ("c", base.T), ("n", counts)],
        version=VERSION,
        folder=tmp_path,
        dtype="float32",
    )
    found = load_file(published.paths()[0])
    assert torch.equal(found["a"], base)
    assert torch.equal(found["b"], base)
    assert torch.equal(found["c"], base.T)
    assert found["n"].dtype == torch.int64


def test_failed_publication_leaves_nothing(tmp_path: Path) -> None:
    """A name that comes twice is refused, and no half-written folder stays."""
    with pytest.raises(ValueError, match=r"'a' came twice"):
        publish_weights(
            [("a", torch.ones(1)), ("a", torch.ones(1))],
            version=VERSION,
            folder=tmp_path,
            dtype="float32",
            bucket_bytes=1,
        )
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"version of 0 or more, got -1"):
        publish_weights([], version=PolicyVersion(-1), folder=tmp_path, dtype="float32")


def test_publication_is_removed_twice_without_harm(tmp_path: Path) -> None:
    """`remove` frees the memory, and a second call finds nothing to do."""
    published = publish_weights(
        [("a", torch.ones(1))], version=VERSION, folder=tmp_path, dtype="float32"
    )
    published.remove()
    published.remove()
    assert not list(tmp_path.iterdir())


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    """One flipped bit in a weight is noticed before anything is loaded."""
    published = publish_weights(
        [("a", torch.ones(1))], version=VERSION, folder=tmp_path, dtype="float32"
    )
    (path,) = published.paths()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"00000.safetensors changed since it was written"):
        check_published(
            published, model={"a": TensorHeader("F32", (1,))}, dtype="float32", tied=False
        )


def test_all_differences_are_named_at_once(tmp_path: Path) -> None:
    """Unknown, missing and misshapen weights stand in one message; A42: nothing is skipped."""
    published = publish_weights(
        [("x.weight", torch.ones(2)), ("extra", torch.ones(1))],
        version=VERSION,
        folder=tmp_path,
        dtype="float32",
    )
    model = {"x.weight": TensorHeader("F32", (3,)), "y.weight": TensorHeader("F32", (1,))}
    with pytest.raises(
        ValueError,
        match=r"version 4 do not fit the model, nothing was loaded: 'extra' is not in the .*; "
        r"'y.weight' is missing; 'x.weight' has shape \[2\], expected \[3\]",
    ):
        check_published(published, model=model, dtype="float32", tied=False)


def test_type_must_be_the_samplers(tmp_path: Path) -> None:
    """Weights published in another type are refused with the type to use."""
    published = publish_weights(
        [("a", torch.ones(1))], version=VERSION, folder=tmp_path, dtype="float32"
    )
    with pytest.raises(ValueError, match=r"as float32, .* computes in bfloat16; publish with dty"):
        check_published(
            published, model={"a": TensorHeader("F32", (1,))}, dtype="bfloat16", tied=False
        )


@pytest.mark.parametrize("sent_head", [False, True])
def test_tied_head_may_be_sent_or_left_out(tmp_path: Path, sent_head: bool) -> None:  # noqa: FBT001
    """A48: the alias of a tied model is accepted if it really equals the embedding."""
    embedding = torch.arange(4.0)
    weights = [("model.embed_tokens.weight", embedding)]
    weights += [("lm_head.weight", embedding)] if sent_head else []
    published = publish_weights(weights, version=VERSION, folder=tmp_path, dtype="float32")
    model = {"model.embed_tokens.weight": TensorHeader("F32", (4,))}
    check_published(published, model=model, dtype="float32", tied=True)


def test_model_folder_is_read_without_loading_it(tmp_path: Path) -> None:
    """Names and shapes come from the headers, through the index if there is one."""
    with pytest.raises(ValueError, match=r"expected a local Hugging Face folder"):
        read_model_headers(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"expected weights as \*.safetensors .* found none"):
        read_model_headers(tmp_path)
    save_file({"a": torch.ones(2, 3)}, tmp_path / "one.safetensors")
    save_file({"rotary_emb.inv_freq": torch.ones(1)}, tmp_path / "two.safetensors")
    assert read_model_headers(tmp_path) == {"a": TensorHeader("F32", (2, 3))}
    index = {"weight_map": {"a": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_model_headers(tmp_path) == {"a": TensorHeader("F32", (2, 3))}
    (tmp_path / "one.safetensors").write_bytes(b"pickled, perhaps")
    with pytest.raises(ValueError, match=r"expected a safetensors file, got 16 bytes"):
        read_model_headers(tmp_path)
