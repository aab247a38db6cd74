"""Writing a Hugging Face folder that transformers and samplers load."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from engine_fsdp.checkpoint import begin_folder, finish_folder
from rl_contracts.train import NamedTensor

SHARD_BYTES = 5 * 10**9
"""Weights per file, as transformers does it; also the most that rank 0 holds at a time."""

_WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".index.json")
"""Files of the source that are not copied: its own weights, in any form."""


def write_pretrained(
    weights: Iterable[NamedTensor],
    folder: Path,
    *,
    dtype: torch.dtype,
    source: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights, and beside them config, tokenizer and other files of `source`.

    Called on every rank, since all take part in gathering the weights; rank 0 writes. The folder
    appears whole, by one rename.

    Raises:
        FileExistsError: if the folder exists, on every rank.
    """
    unfinished = begin_folder(folder)
    if dist.get_rank() == 0:
        _write_weights(weights, unfinished, shard_bytes)
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_ENDINGS):
                shutil.copy2(file, unfinished / file.name)
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)  # the older name of the same entry
        config["dtype"] = str(dtype).removeprefix("torch.")
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    else:
        for _ in weights:
            pass
    finish_folder(unfinished, folder)


def _write_weights(weights: Iterable[NamedTensor], folder: Path, shard_bytes: int) -> None:
    """One model.safetensors, or numbered ones and the index that says which holds what."""
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    held_bytes = total_bytes = 0

    def write() -> None:
        save_file(held, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(held))
        held.clear()

    for name, tensor in weights:
        if held and held_bytes + tensor.nbytes > shard_bytes:
            write()
            held_bytes = 0
        held[name] = tensor.cpu().contiguous()
        held_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    write()
    if len(files) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        file_name = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{index}.safetensors").rename(folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index_json = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n")
