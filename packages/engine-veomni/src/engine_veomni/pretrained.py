"""A Hugging Face folder from weights that come one after the other."""

import json
import shutil
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch import Tensor

from engine_veomni.checkpoint import new_folder
from rl_contracts.train import NamedTensor

MAX_FILE_BYTES: Final = 5 * 2**30
"""Bytes of weights in one file (transformers: 50 GB, older releases 5 GB)."""

_COPIED: Final = ("*.json", "*.txt", "*.jinja", "*.model")
"""What a model's folder holds beside its weights: configuration, tokenizer, chat template."""


def save_pretrained(
    folder: Path,
    weights: Iterable[NamedTensor],
    *,
    source: Path,
    dtype_name: str,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the weights and what `source` holds beside its own; the folder appears by one rename.

    Every rank runs through the weights, rank 0 writes them.

    Args:
        folder: new.
        weights: all weights under their Hugging Face names.
        source: the folder that training started from.
        dtype_name: type of the weights, for config.json.
        max_file_bytes: see `MAX_FILE_BYTES`.

    Raises:
        FileExistsError: if the folder exists.
    """
    remaining = iter(weights)
    with new_folder(folder) as partial:
        if dist.get_rank() != 0:
            deque(remaining, maxlen=0)
            return
        try:
            _write_weights(partial, remaining, max_file_bytes)
        except OSError:
            # the other ranks are in the same gathers: a full disk here must not leave them waiting
            deque(remaining, maxlen=0)
            raise
        for pattern in _COPIED:
            for file in source.glob(pattern):
                if not file.name.endswith(".index.json"):
                    shutil.copyfile(file, partial / file.name)
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = dtype_name
        (partial / "config.json").write_text(json.dumps(config, indent=2))


def _write_weights(folder: Path, weights: Iterable[NamedTensor], max_file_bytes: int) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415 - loaded only when used

    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = 0
    total_bytes = 0

    def flush() -> None:
        nonlocal pending_bytes
        save_file(pending, folder / f"part-{len(files)}", metadata={"format": "pt"})
        files.append(list(pending))
        pending.clear()
        pending_bytes = 0

    for name, tensor in weights:
        if pending and pending_bytes + tensor.nbytes > max_file_bytes:
            flush()
        pending[name] = tensor
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    if len(files) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        file = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{index}").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2)
    )
