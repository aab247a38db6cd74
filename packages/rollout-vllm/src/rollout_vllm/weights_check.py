"""Compares published weights with the model before a single weight is touched."""

import difflib
from collections.abc import Mapping

from rollout_vllm.headers import TensorHeader
from rollout_vllm.publication import Publication

_SHOWN = 5
_TIED_HEAD = "lm_head.weight"


def check_published(
    published: Publication,
    *,
    model: Mapping[str, TensorHeader],
    dtype: str,
    tied: bool,
) -> None:
    """Check names and shapes, and files if there are any.

    Args:
        published: what the trainer wrote or is ready to send.
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
    sent = published.tensors()
    optional = {_TIED_HEAD} if tied else set()
    problems = [
        *_unknown_names(sent, model, optional),
        *_missing_names(sent, model, optional),
        *_wrong_shapes(sent, model),
        *(_different_heads(published) if tied and _TIED_HEAD in sent else []),
    ]
    if problems:
        message = f"{where} do not fit the model, nothing was loaded: " + "; ".join(problems)
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


def _different_heads(published: Publication) -> list[str]:
    """The head of a tied model may be sent, but the engine then uses the embedding for both."""
    return [
        f"the model ties {_TIED_HEAD!r} to {name!r}, and the two were sent with different values"
        for name in published.different_heads(_TIED_HEAD)
    ]


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    rest = len(names) - _SHOWN
    return f"{shown} and {rest} more are" if rest > 0 else f"{shown} {_is_or_are(names)}"


def _is_or_are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
