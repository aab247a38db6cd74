"""The headers of tensors in memory, in safetensors' spelling."""

from collections.abc import Iterable, Mapping

import torch

from rollout_vllm.config import Dtype
from rollout_vllm.headers import TensorHeader

# https://github.com/huggingface/safetensors, safetensors/src/tensor.rs, `Dtype`
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_SAMPLER_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def torch_dtype(name: str) -> torch.dtype:
    """The type of that name in a header.

    Raises:
        ValueError: if weights of that type are not transferred.
    """
    if name not in _DTYPES:
        raise ValueError(f"weights: expected one of {', '.join(_DTYPES)}, got the type {name!r}")
    return _DTYPES[name]


def sampler_dtype(dtype: Dtype) -> torch.dtype:
    """The sampler's type."""
    return _SAMPLER_DTYPES[dtype]


def as_sent(headers: Mapping[str, TensorHeader], *, dtype: Dtype) -> dict[str, TensorHeader]:
    """The headers after floating-point weights were cast to the sampler's type."""
    floating = _NAMES[sampler_dtype(dtype)]
    return {
        name: TensorHeader(floating, header.shape)
        if torch_dtype(header.dtype).is_floating_point
        else header
        for name, header in headers.items()
    }


def tensor_headers(
    weights: Iterable[tuple[str, object]], *, dtype: Dtype
) -> dict[str, TensorHeader]:
    """Headers of weights as a sampler of type `dtype` will get them; reads no value.

    Args:
        weights: as an engine exports them; read once.
        dtype: floating-point weights are cast to it.

    Raises:
        TypeError: if something is not a `torch.Tensor`.
        ValueError: if a name comes twice, or a type is not transferred.
    """
    headers: dict[str, TensorHeader] = {}
    for name, tensor in weights:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"weights: {name!r}: expected a torch.Tensor, got {type(tensor)}")
        if name in headers:
            raise ValueError(f"weights: {name!r} came twice")
        sent = sampler_dtype(dtype) if tensor.is_floating_point() else tensor.dtype
        if sent not in _NAMES:
            raise ValueError(f"weights: {name!r}: tensors of type {sent} are not transferred")
        headers[name] = TensorHeader(_NAMES[sent], tuple(tensor.shape))
    return headers
