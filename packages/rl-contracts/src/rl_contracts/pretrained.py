"""A Hugging Face folder: what it holds, and a new one from weights that come one by one."""

import json
import shutil
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_contracts.shared_folder import new_folder
from rl_contracts.train import NamedTensor

MAX_FILE_BYTES: Final = 5 * 10**9
"""Weights per file, as transformers did it for long; also the most that is held at a time."""

_WEIGHT_ENDINGS: Final = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx"),
    ".index.json",
)
"""Files of the source that are not copied: its own weights, in any form."""


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight in a folder of safetensors; reads no weight.

    Raises:
        FileNotFoundError: if there is no safetensors file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                shapes[name] = tuple(weights.get_slice(name).get_shape())
    if not shapes:
        message = (
            f"{folder}: expected weights in *.safetensors, found none; download or convert the "
            "model first"
        )
        raise FileNotFoundError(message)
    return shapes


def write_pretrained(
    folder: Path,
    weights: Iterable[NamedTensor],
    *,
    source: Path,
    dtype_name: str,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the weights, and beside them config, tokenizer and other files of `source`.

    Called on every rank of torch.distributed, since all take part in gathering the weights; rank 0
    writes. The folder appears whole, by one rename.

    Args:
        folder: new.
        weights: all weights under their Hugging Face names.
        source: the folder that training started from.
        dtype_name: type of the weights, for config.json, such as ``bfloat16``.
        max_file_bytes: see `MAX_FILE_BYTES`; a weight is never split.

    Raises:
        FileExistsError: if the folder exists, on every rank.
        RuntimeError: on the other ranks, if rank 0 cannot write.
    """
    remaining = iter(weights)
    with new_folder(folder) as unfinished:
        try:
            if dist.get_rank() == 0:
                _write_weights(remaining, unfinished, max_file_bytes)
                _copy_others(source, unfinished, dtype_name)
        finally:
            # the other ranks are in the same gathers, also when the disk of rank 0 is full
            deque(remaining, maxlen=0)


def _copy_others(source: Path, folder: Path, dtype_name: str) -> None:
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_ENDINGS):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)  # the older name of the same entry
    config["dtype"] = dtype_name
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_weights(weights: Iterable[NamedTensor], folder: Path, max_file_bytes: int) -> None:
    """One model.safetensors, or numbered ones and the index that says which holds what."""
    mode_source = folder / "mode"
    mode_source.touch()  # has the mode that this process gives new files
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    held_bytes = total_bytes = 0

    def write() -> None:
        part = folder / f"part-{len(files)}"
        save_file(held, part, metadata={"format": "pt"})
        # safetensors makes files that nobody else may read; samplers often run as other users.
        shutil.copymode(mode_source, part)
        files.append(list(held))
        held.clear()

    for name, tensor in weights:
        if held and held_bytes + tensor.nbytes > max_file_bytes:
            write()
            held_bytes = 0
        held[name] = tensor.cpu().contiguous()
        held_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    write()
    mode_source.unlink()
    if len(files) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        file_name = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{index}").rename(folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index_json = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n")
