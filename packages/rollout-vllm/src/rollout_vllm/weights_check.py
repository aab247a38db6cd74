"""Compares published weights with the model before a single weight is touched."""

import difflib
from collections.abc import Mapping
from pathlib import Path

from rollout_vllm.headers import TensorHeader, read_headers
from rollout_vllm.weights_sender import PublishedWeights, file_checksum

_SHOWN = 5
_TIED_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")


def check_published(
    published: PublishedWeights,
    *,
    model: Mapping[str, TensorHeader],
    dtype: str,
    tied: bool,
) -> None:
    """Check files, names and shapes.

    Args:
        published: what the trainer wrote.
        model: what the model's folder holds.
        dtype: type in which the sampler computes.
        tied: whether the head shares the embedding's weight; then it may be left out.

    Raises:
        ValueError: for a name that the model lacks, a weight that is missing, a shape or type
            that differs, or a file that is not what was written.
    """
    where = f"weights of version {published.version}"
    if published.dtype != dtype:
        message = (
            f"{where}: published as {published.dtype}, the sampler computes in {dtype}; "
            f"publish with dtype={dtype!r}"
        )
        raise ValueError(message)
    for file in published.files:
        _check_file(published.folder / file.name, file.num_bytes, file.crc32, where)
    sent = read_headers(published.paths())
    optional = {_TIED_HEAD} if tied else set()
    problems = [
        *_unknown_names(sent, model, optional),
        *_missing_names(sent, model, optional),
        *_wrong_shapes(sent, model),
        *(_untied_heads(published) if tied and _TIED_HEAD in sent else []),
    ]
    if problems:
        message = f"{where} do not fit the model, nothing was loaded: " + "; ".join(problems)
        raise ValueError(message)


def _check_file(path: Path, num_bytes: int, crc32: int, where: str) -> None:
    if not path.is_file():
        message = (
            f"{where}: {path} is not there; a publication is removed once it is loaded "
            "(give keep=True if several samplers load it)"
        )
        raise ValueError(message)
    found = (path.stat().st_size, file_checksum(path))
    if found != (num_bytes, crc32):
        message = (
            f"{where}: {path} changed since it was written: expected {num_bytes} bytes with "
            f"checksum {crc32:08x}, got {found[0]} with {found[1]:08x}"
        )
        raise ValueError(message)


def _unknown_names(
    sent: Mapping[str, TensorHeader], model: Mapping[str, TensorHeader], optional: set[str]
) -> list[str]:
    unknown = [name for name in sent if name not in model and name not in optional]
    if not unknown:
        return []
    close = difflib.get_close_matches(unknown[0], list(model), n=1, cutoff=0.0)
    return [f"{_listed(unknown)} not in the checkpoint (nearest name there: {close[0]!r})"]


def _missing_names(
    sent: Mapping[str, TensorHeader], model: Mapping[str, TensorHeader], optional: set[str]
) -> list[str]:
    missing = [name for name in model if name not in sent and name not in optional]
    return [f"{_listed(missing)} missing"] if missing else []


def _wrong_shapes(sent: Mapping[str, TensorHeader], model: Mapping[str, TensorHeader]) -> list[str]:
    wrong = [
        f"{name!r} has shape {list(header.shape)}, expected {list(model[name].shape)}"
        for name, header in sent.items()
        if name in model and header.shape != model[name].shape
    ]
    rest = len(wrong) - _SHOWN
    return [*wrong[:_SHOWN], *([f"{rest} more of another shape"] if rest > 0 else [])]


def _untied_heads(published: PublishedWeights) -> list[str]:
    """The head of a tied model may be sent, but the engine then uses the embedding for both."""
    import torch  # noqa: PLC0415  (heavy; only here)
    from safetensors import safe_open  # noqa: PLC0415

    found: dict[str, torch.Tensor] = {}
    for path in published.paths():
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name == _TIED_HEAD or name.endswith(_EMBEDDINGS):
                    found[name] = file.get_tensor(name)
    head = found.pop(_TIED_HEAD)
    return [
        f"the model ties {_TIED_HEAD!r} to {name!r}, and the two were sent with different values"
        for name, embedding in found.items()
        if not torch.equal(head, embedding)
    ]


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    rest = len(names) - _SHOWN
    return f"{shown} and {rest} more are" if rest > 0 else f"{shown} {_is_or_are(names)}"


def _is_or_are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
