"""Names, types and shapes in safetensors files, read from their headers alone.

Format: https://github.com/huggingface/safetensors, "Format": eight bytes of header length
(little-endian), then JSON.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# buffers that older checkpoints hold and that vLLM skips too (AutoWeightsLoader, vLLM 0.32)
_SKIPPED = (
    "rotary_pos_emb.inv_freq",
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)


class TensorHeader(NamedTuple):
    """What a safetensors header says of one tensor."""

    dtype: str
    """In safetensors' spelling: ``F32``, ``BF16``."""

    shape: tuple[int, ...]


def read_headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """Headers of all tensors in the files, in order.

    Raises:
        ValueError: if a file is not safetensors, or a name stands in two files.
    """
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= size - 8:
                message = (
                    f"{file}: expected a safetensors file, got {size} bytes that announce a "
                    f"header of {length}"
                )
                raise ValueError(message)
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in tensors:
                message = f"{file}: {name!r} stands in another file of the same model too"
                raise ValueError(message)
            tensors[name] = TensorHeader(entry["dtype"], tuple(entry["shape"]))
    return tensors


def read_model_headers(folder: Path) -> dict[str, TensorHeader]:
    """Headers of the weights that a local Hugging Face folder holds.

    Raises:
        ValueError: if the folder is not there or holds no weights as safetensors.
    """
    if not (folder / "config.json").is_file():
        message = (
            f"model: expected a local Hugging Face folder with a config.json, got {str(folder)!r}; "
            "download the model first and give its folder"
        )
        raise ValueError(message)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        message = (
            f"model: expected weights as *.safetensors in {str(folder)!r}, found none; save the "
            "model with transformers' save_pretrained (pickled weights are not read: they can "
            "run code)"
        )
        raise ValueError(message)
    return {
        name: header for name, header in read_headers(files).items() if not name.endswith(_SKIPPED)
    }
