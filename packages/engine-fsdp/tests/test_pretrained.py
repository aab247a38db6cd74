"""The Hugging Face folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine_fsdp.pretrained import write_pretrained
from rl_contracts.train import NamedTensor

SaveModel = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("shard_bytes", [10**9, 4000])
def test_transformers_reads_it_back(
    save_model: SaveModel, tmp_path: Path, shard_bytes: int
) -> None:
    """One file or several with an index: every weight, the config and the other files are there."""
    source = save_model("llama", tie_word_embeddings=False)
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("stale")
    stored = load_file(source / "model.safetensors")
    halves = [NamedTensor(name, tensor.bfloat16()) for name, tensor in stored.items()]
    target = tmp_path / "out"
    write_pretrained(halves, target, dtype=torch.bfloat16, source=source, shard_bytes=shard_bytes)
    files = sorted(target.glob("*.safetensors"))
    assert (len(files) == 1) == (shard_bytes == 10**9)
    assert all(file.stat().st_size < max(shard_bytes, 10_000) for file in files) or len(files) == 1
    assert (target / "tokenizer.json").read_text() == "{}"
    assert not (target / "pytorch_model.bin").exists()
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(target)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stored[name].bfloat16()), name


def test_an_existing_folder_is_not_overwritten(save_model: SaveModel, tmp_path: Path) -> None:
    """The message names it, and what is in it stays."""
    source = save_model()
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match=r"out: expected a new folder, but it exists"):
        write_pretrained([], tmp_path / "out", dtype=torch.float32, source=source)
